"""The cluster that a trace is replayed on: equal nodes in a tree of switches. It is built from a number of GPUs, from a
TOML file, or from a CSV file with one host and its switches per line."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError

NODE_GPUS, LEAF_NODES = 8, 16
KEYS = ("nodes", "node_gpus", "leaf_nodes", "pod_leaves", "vc")
MOST_NODES = 10**6
REMEDY = "docs/scheduling.md shows one: nodes = 72, node_gpus = 8, leaf_nodes = 16, [vc.NAME] gpus = 64"


@dataclass(frozen=True, slots=True)
class Fleet:
    node_gpus: int
    names: list[str]
    levels: tuple[str, ...]  # levels of switches, the lowest first
    paths: list[tuple[str, ...]]  # per node
    vcs: dict[str, int] = field(default_factory=dict)  # virtual cluster -> its own GPUs

    @property
    def gpus(self) -> int:
        return self.node_gpus * len(self.names)


def of_gpus(gpus: int, node_gpus: int = NODE_GPUS) -> Fleet:
    if gpus < 1 or gpus > MOST_NODES or (gpus > node_gpus and gpus % node_gpus):
        below = gpus // node_gpus * node_gpus
        remedy = f"ask for {below or node_gpus} or {below + node_gpus}, or name a --cluster file"
        raise UserError(f"a cluster is whole nodes of {node_gpus}", field="--gpus", value=gpus, remedy=remedy)
    return regular(max(1, gpus // node_gpus), min(gpus, node_gpus))


def regular(nodes: int, node_gpus: int, leaf_nodes: int = LEAF_NODES, pod_leaves: int = LEAF_NODES) -> Fleet:
    paths: list[tuple[str, ...]] = [
        (f"leaf-{n // leaf_nodes}", f"pod-{n // leaf_nodes // pod_leaves}") for n in range(nodes)
    ]
    return Fleet(node_gpus, [f"n{n}" for n in range(nodes)], ("leaf", "pod"), paths)


def read(path: Path) -> Fleet:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"it cannot be read: {said}", field="--cluster", value=str(path), remedy=REMEDY) from None
    return _of_csv(text, path) if path.suffix == ".csv" else _of_toml(text, path)


def _of_toml(text: str, path: Path) -> Fleet:
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise UserError(f"not a TOML file: {error}", field="--cluster", value=str(path), remedy=REMEDY) from None
    for key in table:
        if key not in KEYS:
            remedy = f"there is {', '.join(KEYS)}"
            raise UserError(f"there is no such key (file {path})", field=key, value=table[key], remedy=remedy)
    nodes, size = _count(table, "nodes", None, path), _count(table, "node_gpus", NODE_GPUS, path)
    fleet = regular(
        nodes, size, _count(table, "leaf_nodes", LEAF_NODES, path), _count(table, "pod_leaves", LEAF_NODES, path)
    )
    fleet.vcs.update(_vcs(table.get("vc", {}), fleet, path))
    return fleet


def _vcs(table: Any, fleet: Fleet, path: Path) -> dict[str, int]:
    out = {}
    for name, entry in table.items() if isinstance(table, dict) else [("vc", table)]:
        if not isinstance(entry, dict) or entry.keys() != {"gpus"}:
            raise UserError(f"it has the key gpus (file {path})", field=f"vc.{name}", value=entry, remedy=REMEDY)
        out[name] = _count(entry, "gpus", None, path, f"vc.{name}.")
        if out[name] % fleet.node_gpus:
            remedy = f"give a multiple of {fleet.node_gpus}"
            raise UserError(f"a virtual cluster has whole nodes (file {path})", field=f"vc.{name}.gpus",
                            value=out[name], remedy=remedy)  # fmt: skip
    if sum(out.values()) > fleet.gpus:
        remedy = f"give them {fleet.gpus} at most"
        raise UserError(f"they have more than the cluster (file {path})", field="vc", value=sum(out.values()),
                        remedy=remedy)  # fmt: skip
    return out


def _count(table: dict[str, Any], key: str, default: int | None, path: Path, under: str = "") -> int:
    value = table.get(key, default)
    if type(value) is not int or not 1 <= value <= MOST_NODES:
        raise UserError(f"expected a whole number from 1 (file {path})", field=under + key, value=value, remedy=REMEDY)
    return value


def _of_csv(text: str, path: Path) -> Fleet:
    """Read one host per line. The columns after `host` are its switches, the highest first. The optional column `gpus`
    is the same for all hosts."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if any(map(str.strip, row))]
    header = [cell.strip().lower() for cell in rows[0]] if rows else []
    if not header or header[0] != "host":
        remedy = "the first line is host,SWITCH,...,LEAF with the highest switch first"
        raise UserError("its first column is not host", field="--cluster", value=str(path), remedy=remedy)
    size = NODE_GPUS
    if "gpus" in header:
        at = header.index("gpus")
        sizes = {row[at].strip() for row in rows[1:] if at < len(row)}
        if len(sizes) != 1 or not (said := sizes.pop()).isdigit() or not int(said):
            remedy = "give every host the same whole number"
            raise UserError("hosts have different numbers of GPUs", field="column gpus", value=str(path), remedy=remedy)
        size = int(said)
    return _of_rows(rows[1:], [i for i, name in enumerate(header) if i and name != "gpus"], header, size, path)


def _of_rows(rows: Sequence[list[str]], at: list[int], header: list[str], size: int, path: Path) -> Fleet:
    names, paths = list[str](), list[tuple[str, ...]]()
    for number, row in enumerate(rows, 2):
        if len(row) < len(header):
            raise UserError(f"line {number} has only {len(row)} columns", field="--cluster", value=str(path),
                            remedy="give every column of the header")  # fmt: skip
        names.append(row[0].strip())
        paths.append(tuple(row[i].strip() for i in reversed(at)))
    if not names or len(set(names)) < len(names):
        raise UserError("it names no host, or one twice", field="--cluster", value=str(path), remedy="name each once")
    return Fleet(size, names, tuple(header[i] for i in reversed(at)), paths)
