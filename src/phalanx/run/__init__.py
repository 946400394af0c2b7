"""The application layer: one run, from a resolved job to its record. Commands and pages stand on it."""
