"""Inject faults into real processes: start a run as a user would, break it, and compare the results."""
