"""Images as sequences: their size, and how many patches of how many features that makes. The data that draws them and
the model that reads them both use this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SYNTHETIC_IMAGES = "synthetic-images"  # data.source
MAX_CLASSES = 8  # that can be drawn


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Square images of `size` pixels a side, cut in squares of `patch` pixels a side."""

    size: int
    patch: int
    channels: int

    @staticmethod
    def of(options: dict[str, Any]) -> ImageShape | None:
        """Make one from model.options `image`, `patch` and `channels`; None if they do not fit."""
        sizes = [options.get(name, 0) for name in ("image", "patch", "channels")]
        if not all(type(size) is int and size > 0 for size in sizes):
            return None
        shape = ImageShape(*sizes)
        return shape if shape.size % shape.patch == 0 else None

    @property
    def num_patches(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def features(self) -> int:
        """Return how many numbers one patch has."""
        return self.patch**2 * self.channels
