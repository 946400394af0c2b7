"""Observe a run, live or afterwards: progress, step rows, the run record. Nothing here needs torch."""
