"""The application layer: one run, from a resolved job to its record. The commands and the web pages build on it."""
