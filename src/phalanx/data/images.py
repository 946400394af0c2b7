"""Small images for a synthetic data set: gratings and shapes at random places, with random contrast and noise. An image
is a function of (seed, number) alone. It is cut into a sequence of patches, and its class is the target at every
patch."""

from __future__ import annotations

import math

import numpy as np

from phalanx.core.image import MAX_CLASSES, ImageShape

CLASSES = ("rows", "columns", "diagonal", "other diagonal", "disc", "ring", "square", "cross")
NOISE = 0.5  # standard deviation; a pattern goes from -1 to 1 times its contrast
assert len(CLASSES) == MAX_CLASSES


class Images:
    def __init__(self, shape: ImageShape, num_classes: int, seed: int):
        assert 2 <= num_classes <= MAX_CLASSES, num_classes
        self.shape, self.num_classes, self.seed = shape, num_classes, seed

    def draw(self, position: int) -> tuple[int, np.ndarray]:
        """Draw an image: its class, and its pixels as (size, size, channels) of float32."""
        s, rng = self.shape, np.random.default_rng([self.seed, position])
        kind = int(rng.integers(self.num_classes))
        contrast = rng.uniform(0.5, 1.0) * rng.choice([-1.0, 1.0])
        tint = rng.uniform(0.5, 1.0, s.channels)
        pixels = contrast * pattern(CLASSES[kind], s.size, rng)[:, :, None] * tint
        return kind, (pixels + NOISE * rng.standard_normal(pixels.shape)).astype(np.float32)

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        s = self.shape
        side = s.size // s.patch
        cut = pixels.reshape(side, s.patch, side, s.patch, s.channels)
        return cut.swapaxes(1, 2).reshape(s.num_patches, s.features)


def pattern(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a pattern: (size, size) values between -1 and 1, on a picture that spans [-1, 1] in width and height."""
    y, x = np.meshgrid(*2 * (np.linspace(-1, 1, size),), indexing="ij")
    directions = {"rows": (1.0, 0.0), "columns": (0.0, 1.0), "diagonal": (0.7, 0.7), "other diagonal": (0.7, -0.7)}
    if name in directions:
        down, right = directions[name]
        return np.sin(math.pi * rng.uniform(2, 3) * (down * y + right * x) + rng.uniform(0, 2 * math.pi))
    radius = rng.uniform(0.35, 0.6)
    y, x = np.abs(y - rng.uniform(-0.4, 0.4)), np.abs(x - rng.uniform(-0.4, 0.4))
    inside = {
        "disc": np.hypot(x, y) < radius,
        "ring": np.abs(np.hypot(x, y) - radius) < radius / 3,
        "square": np.maximum(x, y) < radius * 0.9,
        "cross": (np.minimum(x, y) < radius / 4) & (np.maximum(x, y) < radius),
    }
    return np.where(inside[name], 1.0, -1.0)
