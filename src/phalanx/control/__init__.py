"""Decisions, pure: no I/O, no clock, no threads, no randomness, and time in integer nanoseconds."""
