"""How evenly a mixture spreads its tokens: what a rank reports of a step."""

from __future__ import annotations

import torch

from phalanx.train.worker import _balance


def test_the_least_even_layer_is_named():
    loads = {"layers.1.moe": torch.tensor([4, 4, 4, 4]), "layers.2.moe": torch.tensor([8, 0, 8, 0])}
    assert _balance(loads) == {"load": 2.0, "layer": "layers.2.moe", "idle": 2}
    assert _balance({}) == {}
