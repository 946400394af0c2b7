"""`phalanx family check` finds what is wrong with a family, and nothing where nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.shape import ModelConfig
from phalanx.model.family import load_family
from phalanx.train.parity import AXES, MOST_PARAMS, parity
from tests.system.command import phalanx

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_model.py"
OPTIONS = {"dim": 32, "heads": 4, "layers": 2, "context": 64}
BY_NAME = {axis[0]: axis for axis in AXES}
MISTAKES = {
    # Each rank counts from 0 where its own slice of the sequence begins.
    "positions from x": (
        ("tp 2", "wrong", "positions come from the batch"),
        "positions = batch.document_positions()  # from 0 in every document\n"
        "            x = self.embed(batch.tokens_BL) + self.position(positions)",
        "import torch\n"
        "            x = self.embed(batch.tokens_BL)\n"
        "            x = x + self.position(torch.arange(x.shape[1])[None].repeat(1, 9))[:, : x.shape[1]]",
    ),
    # All outputs of the query before all of the key: half of the ranks get no key.
    "one matrix for query, key and value": (
        ("tp 2", "wrong", "split by features"),
        "(f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.query, self.key, self.value))",
        "(\n"
        "            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)\n"
        "            for t in __import__('torch').cat([self.query(x), self.key(x), self.value(x)], -1)\n"
        "            .unflatten(-1, (-1, 3)).unbind(-1)\n"
        "        )",
    ),
    "an attention of its own": (
        ("cp 2, ring", "wrong", "phalanx.Attend"),
        "self.attend(q, k, v, batch)",
        "nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
    ),
    "work between the blocks": (
        ("pp 2", "wrong", "`units`, `first` and `last`"),
        "        for layer in self.layers:\n            x = layer(x, batch)",
        "        x = x * 1.5\n        for layer in self.layers:\n            x = layer(x, batch)",
    ),
    "dropout": (
        ("tp 2", "refused", "remedy: set layout.tp = 1, or leave the dropout out"),
        "nn.Linear(4 * dim, dim))",
        "nn.Linear(4 * dim, dim), nn.Dropout(0.1))",
    ),
    "dropout without a module": (
        ("pp 2", "refused", "remedy: set layout.pp = 1, or leave the dropout out"),
        "return x + self.mlp(self.norm2(x))",
        "return x + nn.functional.dropout(self.mlp(self.norm2(x)), 0.1)",
    ),
    "a mean over the micro-batch": (
        ("cp 2, ring", "wrong", "batch.positions()"),
        "x = x + self.attention(self.norm1(x), batch)",
        "x = x + self.attention(self.norm1(x - x.mean(1, keepdim=True)), batch)",
    ),
    "a shape that one axis lacks": (
        ("pp 2", "broken", "AttributeError"),
        "x = layer(x, batch)",
        "x = layer(x * self.embed.weight.mean(), batch)",
    ),
}


def found(file: Path, *axes: str):
    family = f"{file}:FAMILY"
    job = Job(model=ModelConfig(family=family, vocab_size=48, options=OPTIONS))
    return list(parity(job, load_family(family), [BY_NAME[axis] for axis in axes]))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_explained(tmp_path, name):
    (axis, verdict, why), right, wrong = MISTAKES[name]
    text = EXAMPLE.read_text()
    assert right in text
    file = tmp_path / f"mistake_{list(MISTAKES).index(name)}.py"
    file.write_text(text.replace(right, wrong))
    (finding,) = found(file, axis)
    assert (finding.axis, finding.verdict) == (axis, verdict) and why in finding.why, finding


def test_keys_and_values_of_unequal_widths_need_ulysses(tmp_path):
    file = tmp_path / "unequal_widths.py"
    right = "self.attend(q, k, v, batch)"
    assert right in EXAMPLE.read_text()
    file.write_text(EXAMPLE.read_text().replace(right, "self.attend(q[..., ::2], k[..., ::2], v, batch)"))
    ring, ulysses = found(file, "cp 2, ring", "cp 2, Ulysses")
    assert ring.verdict == "refused" and 'remedy: set layout.cp_style = "ulysses"' in ring.why, ring
    assert "layout.cp_style = 'ring': keys are 4 wide and values 8" in ring.why and ulysses.verdict == "right", ulysses


def test_the_command_tells_axis_by_axis(tmp_path):
    sets = [part for key, value in OPTIONS.items() for part in ("--set", f"model.options.{key}={value}")]
    done = phalanx(tmp_path, "family", "check", f"{EXAMPLE}:FAMILY", *sets, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["ok"], done
    assert {row["axis"]: row["verdict"] for row in said["axes"]} == dict.fromkeys(list(BY_NAME)[:-1], "right")
    assert all(row["error"] <= said["bar"] for row in said["axes"])


def test_what_is_too_large_is_refused():
    big = replace(ModelConfig(), dim=4096, ffn_dim=8192, num_layers=8)
    with pytest.raises(UserError, match=f"{MOST_PARAMS:,} at most"):
        next(parity(Job(model=big), load_family("dense")))
