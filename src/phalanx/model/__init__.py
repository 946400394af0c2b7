"""The model families, as plain modules, and the door through which every family enters."""

from phalanx.model.attention import Attend
from phalanx.model.family import Batch, Family, Init, load_family

__all__ = ["Attend", "Batch", "Family", "Init", "load_family"]
