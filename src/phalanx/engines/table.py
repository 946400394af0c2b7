"""The list of engines. The module of each has these functions:

adapter(where, job) -> Adapter                        starts agents from this process (`runtime.launch`)
submission(where, job, arguments) -> Submission|None  what is submitted to the engine, which then runs the command with
                                                      these arguments; None: the run starts in this process

and, if runs can be submitted:

state(id) -> str          state of a submitted run, in the engine's words; "": it is over
stop(id, now)             ask the run to save and end, or to end now
sets(where, given) -> []  `--set` with values filled in that only the engine knows (optional)
follow(id) -> int         show a run whose record is out of this host's reach; return the exit code (optional)
logs(id) -> str           the log of its controller (optional)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.runtime.launch import Adapter

ENGINES = {
    "local": "phalanx.engines.this_machine",
    "ssh": "phalanx.engines.ssh",
    "slurm": "phalanx.engines.slurm",
    "ray": "phalanx.engines.ray",
    "kubernetes": "phalanx.engines.kubernetes",
}


@dataclass(frozen=True, slots=True)
class Where:
    """The user's choice of nodes. `hosts`: a,b,c or a file; `options`: for the engine, by name."""

    on: str = "local"
    hosts: str = ""
    options: dict[str, str] = field(default_factory=dict)


class Submission(Protocol):
    """A run that is ready to be submitted to an engine."""

    is_array: bool  # it is several runs, or its record is where this host cannot follow it

    def text(self) -> str: ...  # for display: all that would be submitted

    def send(self) -> str: ...  # submits it and returns its id


def options_of(texts: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE options, each key once."""
    found: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not key or not sign or key in found:
            wrong = f"{key} is named twice" if key in found else "it is not an option"
            remedy = "write KEY=VALUE, each key once; docs/clusters.md lists them for each engine"
            raise UserError(wrong, field="--engine", value=text, remedy=remedy)
        found[key] = value
    return found


def _engine(on: str) -> Any:
    if on not in ENGINES:
        remedy = f"choose {', '.join(ENGINES)}; for anything else see `phalanx controller`"
        raise UserError("there is no such engine", field="--on", value=on, remedy=remedy)
    return importlib.import_module(ENGINES[on])


def adapter_of(where: Where, job: Job) -> Adapter:
    adapter: Adapter = _engine(where.on).adapter(where, job)
    return adapter


def submission_of(where: Where, job: Job, arguments: Sequence[str]) -> Submission | None:
    found: Submission | None = _engine(where.on).submission(where, job, arguments)
    return found


def sets_of(where: Where, given: Sequence[str]) -> list[str]:
    fill = getattr(_engine(where.on), "sets", None)
    return list(fill(where, given) if fill else given)


def state_of(reference: dict[str, str]) -> str:
    """Return the engine's state of a run (`Adapter.reference`); "": it is over, or no engine knows it."""
    return str(_engine(reference["on"]).state(reference["id"])) if reference else ""


def ask_to_stop(reference: dict[str, str], now: bool) -> None:
    _engine(reference["on"]).stop(reference["id"], now)


def reference_of(text: str) -> dict[str, str]:
    """Parse ENGINE:ID, the name of a run without a record here; {}: the text has another form."""
    on, sign, number = text.partition(":")
    return {"on": on, "id": number} if sign and on in ENGINES else {}


def follow(reference: dict[str, str]) -> int:
    return int(_optional("follow", reference)(reference["id"]))


def logs(reference: dict[str, str]) -> str:
    return str(_optional("logs", reference)(reference["id"]))


def _optional(name: str, reference: dict[str, str]) -> Any:
    found = getattr(_engine(reference["on"]), name, None)
    if found is None:
        text, value = f"a run on {reference['on']} has a record", f"{reference['on']}:{reference['id']}"
        raise UserError(text, field="RUN", value=value, remedy="name its folder; `phalanx runs ls` lists them")
    return found


def refuse_options(where: Where) -> None:
    """Refuse options for an engine that has none."""
    for key, value in where.options.items():
        message = f"{where.on} has no options"
        raise UserError(message, field="--engine", value=f"{key}={value}", remedy="leave it out, or name another --on")
