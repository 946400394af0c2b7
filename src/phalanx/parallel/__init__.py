"""The mesh, and how each axis is applied to a model."""
