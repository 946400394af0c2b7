"""A scenario is a fleet, a job in it, and a policy for failures. It is read from TOML, shipped or the user's own;
what-ifs change single fields."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.twin.assumed import Assumptions

POLICIES = {
    "restart": "every failure stops the job, which starts again from its last checkpoint",
    "hot": "every failure stops the job; a warm node takes the place, state comes from memory",
    "contained": "the other replicas go on, a spare heals the broken one, which joins again",
    "shrink": "the other replicas go on; there are no spares, a repaired node heals the broken one",
}
UNITS_S = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class Scenario:
    name: str
    gpus: int
    hardware: str
    step_s: float  # at full strength
    about: str = ""
    model: str = ""
    params: float = 1e12
    days: float = 54.0
    policy: str = "contained"
    quality: str | float = "llama3"
    spares: float = 0.01  # spare nodes, as a share of the job's nodes
    age_days: float = 3650.0  # age of the nodes; young ones fail more
    interval_s: float = 0.0  # between checkpoints; 0: the control plane chooses
    stall_s: float = -1.0  # per checkpoint; -1: as assumed
    stop_s: float = 0.0  # stop of the gang per failure; 0: as assumed
    detect_s: float = -1.0  # time to detect a failure; -1: as assumed, or as the control plane detects it
    late_s: float = -1.0  # until a spare starts beside ranks that restart; -1: the control plane's default
    replica_gpus: int = 2048
    node_gpus: int = 0  # per node; 0: as many as the hardware has
    ranks_per_node: int = 0  # per node of the simulated gang; 0: one per GPU; 1: a rank is a whole node, and faster
    micro_batches: int = 1  # per rank and step
    pass_s: float = 0.0  # time of one micro-batch through a replica; 0: a step divided by its micro-batches
    switch_nodes: int = 2  # nodes that a switch cuts off
    switch_slow: float = 1.0  # factor by which a switch fault slows the step if it cuts off no node
    sites: int = 1
    distance_km: float = 0.0  # between sites
    site: str = "world-average"
    assume: dict[str, float] = field(default_factory=dict)

    @property
    def gpus_per_node(self) -> int:
        from phalanx.hardware.catalogue import load

        return self.node_gpus or load().node(self.hardware).chips

    @property
    def num_spares(self) -> int:
        """Return the number of spare nodes."""
        return -int(-self.spares * (self.gpus // self.gpus_per_node) // 1)

    @property
    def assumed(self) -> Assumptions:
        return Assumptions(self.assume)

    def checked(self) -> Scenario:
        per_node = self.gpus_per_node
        _expect(self.policy in POLICIES, "policy", self.policy, f"choose among {', '.join(POLICIES)}")
        _expect(
            self.gpus >= per_node and self.gpus % per_node == 0,
            "gpus",
            self.gpus,
            f"{self.hardware} has nodes of {per_node}: take a multiple",
        )
        fits = self.replica_gpus > 0 and 0 in (self.replica_gpus % per_node, per_node % self.replica_gpus)
        whole = fits and self.gpus % self.replica_gpus == 0
        if self.policy in ("contained", "shrink"):
            _expect(
                whole,
                "replica_gpus",
                self.replica_gpus,
                f"take a divisor of gpus = {self.gpus} that is a multiple or a divisor of {per_node}",
            )
            _expect(
                self.gpus > self.replica_gpus,
                "replica_gpus",
                self.replica_gpus,
                "take at least two replicas, or policy = restart or hot",
            )
        for name in ("days", "step_s"):
            _expect(0 < getattr(self, name) < 1e6, name, getattr(self, name), "write a number > 0")
        _expect(0 <= self.spares <= 1, "spares", self.spares, "write a share of the nodes, such as 2%")
        _expect(self.micro_batches >= 1, "micro_batches", self.micro_batches, "write at least 1")
        ranks = self.ranks_per_node
        _expect(0 <= ranks <= per_node, "ranks_per_node", ranks, f"write 1 to {per_node}, or 0 for one each GPU")
        _expect(self.sites >= 1, "sites", self.sites, "write at least 1")
        self.assumed.quality(self.quality)
        return self

    def changed(self, text: str) -> Scenario:
        """Return the scenario with a what-if such as spares=2%,detect=5s."""
        found: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, value = part.partition("=")
            key = _ALIASES.get(name.strip(), name.strip())
            _expect(bool(equals), "--what-if", part, "write name=value, such as spares=2%")
            if "." in key:
                found.setdefault("assume", dict(self.assume))[key] = _number(name, value)
            elif key in _FIELDS and key not in ("name", "about", "assume"):
                found[key] = _value(key, value)
            else:
                raise _unknown("--what-if", key, name, [*_ALIASES, *_FIELDS])
        return dataclasses.replace(self, name=f"{self.name} {text}", **found).checked()


_FIELDS = {f.name: f.type for f in dataclasses.fields(Scenario)}
_ALIASES = {"interval": "interval_s", "detect": "detect_s", "stop": "stop_s", "stall": "stall_s", "step": "step_s",
            "late": "late_s", "replica": "replica_gpus", "repair": "repair.swap_h", "form": "contained.form_base_s",
            "storage": "checkpoint.storage_gb_per_s"}  # fmt: skip


def _expect(good: bool, name: str, value: object, remedy: str) -> None:
    if not good:
        raise UserError("that cannot be simulated", field=name, value=value, remedy=remedy)


def _unknown(where: str, key: str, value: object, names: Iterable[str]) -> UserError:
    near = difflib.get_close_matches(key, names, 3)
    remedy = f"did you mean {', '.join(near)}?" if near else f"there is {', '.join(names)}"
    return UserError("no such field", field=where, value=value, remedy=remedy)


def _number(name: str, text: str) -> float:
    """Parse a number, a share in %, or a time with its unit."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(%|[a-z]*)\s*", text)
    if not found or found[2] not in (*UNITS_S, "%"):
        raise UserError("expected a number", field="--what-if", value=f"{name}={text}",
                        remedy="write 2%, 5s, 10min, 4h or a plain number")  # fmt: skip
    value = float(found[1]) * (0.01 if found[2] == "%" else UNITS_S[found[2]])
    return value / 3600 if name == "repair" else value


def _value(key: str, text: str) -> Any:
    kind = str(_FIELDS[key])
    if "str" in kind:
        text = text.strip()
        return float(text) if key == "quality" and re.fullmatch(r"[0-9.]+", text) else text
    number = _number(key, text)
    return (
        number / 86_400
        if key in ("days", "age_days") and text.strip()[-1] in "dhn"
        else int(number)
        if kind == "int"
        else number
    )


def shipped() -> dict[str, str]:
    """Return the names of the shipped scenarios, and what each is about."""
    folder = resources.files("phalanx.twin").joinpath("data/scenarios")
    names = sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    return {name: _table(name)["about"] for name in names}


def _table(name: str) -> dict[str, Any]:
    file = resources.files("phalanx.twin").joinpath(f"data/scenarios/{name}.toml")
    return tomllib.loads(file.read_text())


def load(name: str) -> Scenario:
    """Load a shipped scenario by name, or a TOML file of the same form."""
    path = Path(name)
    if name.endswith(".toml") or path.is_file():
        try:
            return of_table(path.stem, tomllib.loads(path.read_text()))
        except OSError as error:
            raise UserError(
                f"cannot be read: {error.strerror}", field="scenario", value=name, remedy="name a TOML file"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(
                f"is no TOML: {error}", field="scenario", value=name, remedy="see docs/twin.md for an example"
            ) from None
    known = shipped()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3)
        remedy = f"did you mean {', '.join(near)}?" if near else f"there is {', '.join(known)}; or name a TOML file"
        raise UserError("no such scenario", field="scenario", value=name, remedy=remedy)
    return of_table(name, _table(name))


def of_table(name: str, table: dict[str, Any]) -> Scenario:
    table = _over_base(table)
    for key, value in table.items():
        if key not in _FIELDS or key == "name":
            raise _unknown(f"{name}.{key}", key, value, _FIELDS)
        kinds = {"int": (int,), "float": (int, float), "str": (str,), "str | float": (str, int, float)}.get(
            str(_FIELDS[key]), (dict,)
        )
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UserError(
                f"expected {_FIELDS[key]}", field=f"{name}.{key}", value=value, remedy="see docs/twin.md for an example"
            )
    missing = [key for key in ("gpus", "hardware", "step_s") if key not in table]
    if missing:
        raise UserError(
            "is missing", field=f"{name}.{missing[0]}", value=None, remedy="add it, or a base to take it from"
        )
    return Scenario(name=name, **table).checked()


def _over_base(table: dict[str, Any]) -> dict[str, Any]:
    """Merge a scenario over its base."""
    base = table.pop("base", None)
    if base is None:
        return table
    if base not in shipped():
        raise UserError("no such scenario", field="base", value=base, remedy=f"there is {', '.join(shipped())}")
    under = _over_base(_table(base))
    assume = {**under.pop("assume", {}), **table.pop("assume", {})}
    return {**under, **table, "assume": assume}
