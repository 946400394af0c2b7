"""The memory tier, the durable tier, loading into another layout, and other formats."""
