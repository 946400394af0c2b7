"""The model families, as plain modules, and the door through which every family enters."""

from phalanx.core.weights import Weight
from phalanx.model.attention import Attend
from phalanx.model.family import Batch, Family, Init, load_family
from phalanx.model.head import Head

__all__ = ["Attend", "Batch", "Family", "Head", "Init", "Weight", "load_family"]
