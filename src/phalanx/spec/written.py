"""Write a job file for a converted model: its full [model], and a run that continues its training."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from phalanx.core.shape import ModelConfig

SIZES = ("family", "vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")
TEXT = """\
# Continues the training of {name}. The layout is planned for the devices that are there.
name = {quoted}

[model]
{model}

[train]
steps = 1000
seq_len = {seq_len}     # of {context} that the model is made for
global_batch = 16
micro_batch = 1
precision = "bf16"

[optimizer]
lr = 1e-5           # a tenth of a usual first learning rate: the weights are good already

[data]
source = {data}

[checkpoint]
start = {start}
"""


def job_text(model: ModelConfig, name: str, start: str, data: str) -> str:
    """Render the job file. Paths are written as they are given."""
    context = model.context or 4096
    return TEXT.format(
        name=name,
        quoted=json.dumps(name),
        model="\n".join(f"{field} = {_value(value)}" for field, value in _fields(model) if field != "options"),
        seq_len=min(context, 4096),
        context=context,
        data=json.dumps(data),
        start=json.dumps(start),
    ) + _options(model)


def _fields(model: ModelConfig) -> list[tuple[str, Any]]:
    plain = ModelConfig()
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return [(n, getattr(model, n)) for n in names if n in SIZES or getattr(model, n) != getattr(plain, n)]


def _options(model: ModelConfig) -> str:
    if not model.options:
        return ""
    return "\n[model.options]\n" + "\n".join(f"{key} = {_value(value)}" for key, value in model.options.items()) + "\n"


def _value(value: Any) -> str:
    """Render a TOML value. JSON writes text, numbers, booleans and lists of them the same way."""
    return json.dumps(value)
