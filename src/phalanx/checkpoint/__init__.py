"""Checkpoints: the memory tier, the durable tier, loading into another layout, and conversion to other formats."""
