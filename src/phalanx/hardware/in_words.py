"""The catalogue in words, for people: one table per section, and every figure of an entry in the unit of its key."""

from __future__ import annotations

from typing import Any

from phalanx.hardware.catalogue import Catalogue
from phalanx.hardware.keys import SECTIONS, Key, Section
from phalanx.hardware.nouns import Fabric, Tier

Table = tuple[list[str], list[list[str]]]  # header and rows


def tables(catalogue: Catalogue) -> dict[str, Table]:
    """Return a table for each section, of the figures by which entries are compared."""
    said: dict[str, list[str]] = {}
    for name, node in catalogue.names.items():
        said.setdefault(node, []).append(name)
    chips = [
        [
            chip.name,
            chip.vendor,
            *(_number(chip.peak.get(precision, 0), 1e12) for precision in ("bf16", "fp8", "nvfp4")),
            _number(chip.mamf.get("bf16", 0), 1e12),
            _number(chip.memory_bytes, 2**30),
            _number(chip.memory_bytes_per_s, 1e12),
            str(chip.sms),
            _number(chip.watts),
        ]
        for chip in catalogue.chips.values()
    ]
    nodes = [
        [
            node.name,
            f"{node.chips} x {node.chip.name}",
            f"{_number(node.scale_up.bytes_per_s, 1e9)} {node.scale_up.shape} of {node.scale_up.domain:,}",
            _number(node.nic_bytes_per_s, 1e9 / 8),
            _number(node.watts, 1e3),
            f"{node.dollars_per_chip_hour.median:.2f}" if node.dollars_per_chip_hour else "-",
            node.fabric,
            ", ".join(said.get(node.name, [])),
        ]
        for node in catalogue.nodes.values()
    ]
    fabrics = [
        [
            fabric.name,
            fabric.kind,
            fabric.technology,
            str(fabric.radix or "-"),
            "yes" if fabric.sharp else "no",
            _tiers(fabric),
            fabric.larger or "-",
        ]
        for fabric in catalogue.fabrics.values()
    ]
    sites = [
        [site.name, f"{site.pue:.2f}", f"{site.grams_co2_per_kwh:g}", f"{site.dollars_per_kwh:.4f}"]
        for site in catalogue.sites.values()
    ]
    return {
        "chips": (["chip", "vendor", "bf16 TF", "fp8 TF", "nvfp4 TF", "bf16 got", "GiB", "TB/s", "units", "W"], chips),
        "nodes": (["node", "chips", "scale-up GB/s", "Gbit/s", "kW", "$/chip-h", "fabric", "also called"], nodes),
        "fabrics": (["fabric", "kind", "technology", "radix", "reduces", "tiers", "larger"], fabrics),
        "sites": (["site", "PUE", "gCO2/kWh", "$/kWh"], sites),
    }


def _tiers(fabric: Fabric) -> str:
    def text(tier: Tier) -> str:
        share = "" if tier.bytes_per_s_factor == 1 else f" at 1:{1 / tier.bytes_per_s_factor:.3g}"
        return f"{tier.name} {tier.latency_s * 1e6:g} us{share}"

    return ", ".join(map(text, fabric.tiers))


def entry(section: str, noun: Any) -> list[tuple[str, str, str]]:
    """Return every key of an entry with its value, as a hardware file would have it, and its meaning."""
    return [line for line in _lines(SECTIONS[section], noun) if line[0] != "source"]


def _lines(shape: Section, noun: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    lines = []
    for name, key in shape.keys.items():
        value, at = getattr(noun, key.to), prefix + name
        if key.inside and value is not None:
            for i, inner in enumerate(value if key.kind == "tables" else [value]):
                where = f"{at}[{i}]." if key.kind == "tables" else f"{at}."
                lines += _lines(key.inside, inner, where)
        else:
            lines.append((at, _text(key, value), key.help))
    return lines


def _text(key: Key, value: Any) -> str:
    match key.kind:
        case "number" if value or key.least:
            return f"{value / key.scale:.6g}"
        case "ratio":
            return f"{1 / value:.6g}"
        case "figures" if value:
            return ", ".join(f"{name} {figure / key.scale:.6g}" for name, figure in value.items())
        case "counts" if value:
            return " x ".join(map(str, value))
        case "flag":
            return "yes" if value else "no"
        case "text" | "count" if value:
            return str(getattr(value, "name", value))
    return "-"


def _number(value: float, scale: float = 1.0) -> str:
    """Write a figure in three or four digits; one that is not published is a dash."""
    scaled = value / scale
    return "-" if not value else f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"
