"""Replay of job traces: what a queueing policy would have done with the jobs that a cluster really got."""
