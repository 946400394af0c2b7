"""Phalanx trains very large models on very many accelerators.

    import phalanx
    phalanx.train({"model": {"family": "my_model.py:FAMILY"}, "layout": {"shard": 2, "tp": 2}})

`Family`, `Init`, `Batch`, `Attend` and `Head` are the door for a model of your own (phalanx.model.family).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def train(job: Mapping[str, Any] | str | Path, sets: Sequence[str] = ()) -> dict[str, Any]:
    """Run a job, given as a mapping or as a job file, on this machine; returns its summary. A layout that it does not
    give is planned, as by `phalanx train`."""
    from phalanx.run.console import Console
    from phalanx.run.planned import resolve
    from phalanx.run.training import run_job

    resolved, forecast = resolve(job if isinstance(job, Mapping) else Path(job), list(sets))
    with Console(resolved.job, forecast) as console:
        return run_job(resolved.job, resolved.origins, console, forecast=forecast)


def __getattr__(name: str) -> Any:
    if name in ("Attend", "Batch", "Family", "Head", "Init"):  # these need torch; importing phalanx does not
        import phalanx.model

        return getattr(phalanx.model, name)
    raise AttributeError(name)
