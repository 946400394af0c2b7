"""Fault injection on real processes: it starts a run as a user would, breaks it, and compares what comes out."""
