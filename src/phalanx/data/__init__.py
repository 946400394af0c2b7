"""Data sets: building and reading them, and the order in which a run is served their samples."""
