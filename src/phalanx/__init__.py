"""Phalanx trains very large models on very many accelerators."""

__version__ = "0.1.0"
