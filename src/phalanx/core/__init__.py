"""The shared nouns. Standard library and numpy only; imports nobody."""
