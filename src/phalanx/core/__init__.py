"""The shared nouns. They use only the standard library and numpy, and import no other package of the project."""
