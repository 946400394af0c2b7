"""The catalogue: packaged files, then the user's own over them, looked up by name. A cluster is put together here,
and refused where its counts do not fit its nodes or its fabric."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from phalanx.core.errors import UserError
from phalanx.hardware.nouns import Chip, Cluster, Fabric, Node, Site
from phalanx.hardware.overlays import Layer, build, lay_over, plain, read_layer

PACKAGED = ("chips.toml", "nodes.toml", "fabrics.toml", "sites.toml")
DEFAULT_SITE = "world-average"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Catalogue:
    chips: dict[str, Chip]
    nodes: dict[str, Node]
    fabrics: dict[str, Fabric]
    sites: dict[str, Site]
    names: dict[str, str]  # a common name -> the node it stands for

    def chip(self, name: str) -> Chip:
        """Find a chip by its own name, or the chip of a node."""
        said = plain(name)
        if said in self.chips:
            return self.chips[said]
        if said in self.nodes or said in self.names:
            return self.node(said).chip
        return _find(self.chips, name, "chip", self.names)

    def node(self, name: str) -> Node:
        said = plain(name)
        return _find(self.nodes, name if said in self.nodes else self.names.get(said, name), "hardware", self.names)

    def fabric(self, name: str) -> Fabric:
        """Find a fabric by name; "fat-tree-ndr:3" is the one whose leaves are oversubscribed 3 to 1."""
        base, colon, ratio = name.partition(":")
        found = _find(self.fabrics, base, "fabric")
        if not colon:
            return found
        if not re.fullmatch(r"\d+(\.\d+)?", ratio) or float(ratio) < 1:
            remedy = "write a number >= 1 after the colon, such as fat-tree-ndr:3"
            raise UserError("that is no oversubscription", field="fabric", value=name, remedy=remedy)
        near, *far = found.tiers
        narrow = [replace(tier, bytes_per_s_factor=tier.bytes_per_s_factor / float(ratio)) for tier in far]
        return replace(found, name=name, tiers=(near, *narrow))

    def site(self, name: str) -> Site:
        return _find(self.sites, name, "site")

    def find(self, name: str) -> dict[str, Chip | Node | Fabric | Site]:
        """Return all entries of this name, by section."""
        said = plain(name)
        found: dict[str, Any] = {
            "chips": self.chips.get(said),
            "nodes": self.nodes.get(said) or self.nodes.get(self.names.get(said, "")),
            "fabrics": self.fabric(name) if said.partition(":")[0] in self.fabrics else None,
            "sites": self.sites.get(said),
        }
        if not any(found.values()):
            _find({**self.chips, **self.nodes, **self.fabrics, **self.sites}, name, "name", self.names)
        return {section: noun for section, noun in found.items() if noun}

    def cluster(self, hardware: str, gpus: int, fabric: str | None = None, site: str | None = None) -> Cluster:
        """Build a cluster of so many chips in whole nodes; fewer than a node has are a share of one."""
        node = self.node(hardware)
        if 0 < gpus < node.chips and node.chips % gpus == 0:
            node = node.share(gpus)
        if gpus < 1 or gpus % node.chips:
            below, above = gpus // node.chips * node.chips, (gpus // node.chips + 1) * node.chips
            nearest = f"{below:,} or {above:,}" if below > 0 else f"{above:,}"
            raise UserError(
                f"{node.name} has {node.chips} chips, and a cluster is whole nodes",
                field="gpus",
                value=gpus,
                remedy=f"ask for {nearest}; of a single node also for a divisor of {node.chips}",
            )
        nodes = gpus // node.chips
        wired = self.fabric(fabric).sized(node, nodes) if fabric else self._usual(node, nodes)
        return Cluster(node, wired, nodes, self.site(site or DEFAULT_SITE))

    def _usual(self, node: Node, nodes: int) -> Fabric:
        """Return the node's own fabric, or the larger one that takes over from it."""
        fabric = self.fabrics[node.fabric]
        for _ in self.fabrics:  # no more steps than there are fabrics: a user's file may go round in a circle
            try:
                return fabric.sized(node, nodes)
            except UserError:
                if not fabric.larger:
                    raise
                fabric = self.fabrics[fabric.larger]
        return fabric.sized(node, nodes)


def home_file() -> Path:
    """Return the path of the user's own entries; the file need not be there."""
    return Path(os.path.expanduser("~/.config/phalanx/hardware.toml"))  # Path.home() fails where there is no home


def load_packaged() -> Catalogue:
    """Load what comes with the project, without a user's additions."""
    return Catalogue(**build(_packaged()))


def load(user_file: Path | None = None) -> Catalogue:
    """Load the packaged entries, with those of `home_file` over them, and those of `user_file` over both."""
    layer, home = _packaged(), home_file()
    for path in ([home] if os.path.isfile(home) else []) + ([user_file] if user_file else []):
        lay_over(layer, read_layer(_bytes_of(path), str(path)), str(path))
    return Catalogue(**build(layer))


def _packaged() -> Layer:
    folder = resources.files("phalanx.hardware")
    layer: Layer = {}
    for name in PACKAGED:
        lay_over(layer, read_layer(folder.joinpath(name).read_bytes(), name), name, packaged=True)
    return layer


def cluster(hardware: str, gpus: int, fabric: str | None = None, site: str | None = None) -> Cluster:
    return load().cluster(hardware, gpus, fabric, site)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "name a TOML file; docs/hardware.md has an example"
        raise UserError(f"cannot be read: {reason}", field="hardware file", value=str(path), remedy=remedy) from None


def _find(entries: dict[str, T], name: str, what: str, names: Iterable[str] = ()) -> T:
    said = plain(name)
    if said in entries:
        return entries[said]
    near = difflib.get_close_matches(said, {*entries, *names}, n=4, cutoff=0.5)
    listing = f"did you mean {', '.join(near)}?" if near else f"there is {', '.join(entries)}."
    raise UserError(
        "the catalogue has no such entry",
        field=what,
        value=name,
        remedy=f"{listing} `phalanx hardware ls` lists all, and your own go in a file (docs/hardware.md)",
    )
