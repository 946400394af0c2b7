"""The keys of a hardware file: what an entry may say, in which unit, and what it becomes. Files use the units of data
sheets (TFLOP/s, GiB, Gbit/s); behind the loader everything is in SI units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.hardware import rules
from phalanx.hardware.nouns import Chip, Fabric, Node, Price, ScaleUp, Site, Tier

REQUIRED = object()
TINY = 1e-12  # as the least value: more than nothing
GIB = 2.0**30
GIGABIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class Key:
    """One key: `kind` is text, flag, count (a whole number), number, ratio (kept as its inverse), figures (numbers
    by precision), texts, counts, table or tables; numbers are multiplied by `scale` on the way in."""

    to: str  # the attribute it becomes
    kind: str
    help: str
    default: Any = REQUIRED
    scale: float = 1.0
    least: float = 0.0
    most: float = 1e15
    choices: tuple[str, ...] = ()
    inside: Section | None = None  # of a table, or of each of the tables

    def describe(self) -> str:
        """Describe what may be written for it."""
        if self.choices:
            return "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        bound = "> 0" if self.least == TINY else f">= {self.least:g}"
        parts = ", ".join(self.inside.keys) if self.inside else ""
        return {
            "text": "text in quotes",
            "flag": "true or false",
            "count": f"a whole number {bound}",
            "number": f"a number {bound}",
            "ratio": f"a number {bound}",
            "figures": "a table such as { bf16 = 989.4 }",
            "texts": "text in quotes, or a list of it",
            "counts": "a list of whole numbers",
            "table": f"a table with {parts}",
            "tables": f"a list of tables with {parts}",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Section:
    noun: type[Any]
    keys: dict[str, Key]
    rule: Callable[[dict[str, Any]], rules.Wrong] = lambda fields: None
    named: bool = True  # an entry with a name of its own


SOURCE = Key("source", "texts", "Where the figures are from.")

SCALE_UP = Section(
    ScaleUp,
    {
        "name": Key("name", "text", "What it is called."),
        "shape": Key("shape", "text", "How chips are joined.", choices=("switch", "mesh", "torus")),
        "domain": Key("domain", "count", "Chips that reach each other on it.", least=1),
        "gb_per_s": Key("bytes_per_s", "number", "GB/s one way per chip, over all its links.", scale=1e9, least=TINY),
        "link_gb_per_s": Key("link_bytes_per_s", "number", "GB/s one way between two neighbours.", scale=1e9),
        "latency_us": Key("latency_s", "number", "Microseconds between neighbours.", scale=1e-6),
        "sharp": Key("sharp", "flag", "Whether the switch reduces (NVLS).", default=False),
        "dims": Key("dims", "counts", "Sides of the largest torus.", default=()),
    },
    rule=rules.scale_up,
    named=False,
)
PRICE = Section(
    Price,
    {
        "median": Key("median", "number", "US dollars for a chip and an hour: the middle offer."),
        "low": Key("low", "number", "The lowest offer."),
        "high": Key("high", "number", "The highest offer."),
        "source": Key("source", "text", "Where the prices are from."),
    },
    rule=rules.price,
    named=False,
)
TIER = Section(
    Tier,
    {
        "name": Key("name", "text", "What the tier is called."),
        "span_nodes": Key("span_nodes", "count", "Nodes within it; absent: what the radix gives.", default=0),
        "oversubscription": Key(
            "bytes_per_s_factor", "ratio", "How many times less than the cards can send passes.", default=1.0, least=1.0
        ),
        "latency_us": Key("latency_s", "number", "Microseconds one way for a small message.", scale=1e-6),
    },
    named=False,
)

SECTIONS: dict[str, Section] = {
    "chips": Section(
        Chip,
        {
            "vendor": Key("vendor", "text", "Who makes it."),
            "peak_tflops": Key("peak", "figures", "TFLOP/s by precision, without sparsity.", scale=1e12, least=TINY),
            "memory_gib": Key("memory_bytes", "number", "GiB that a process can allocate from.", scale=GIB, least=TINY),
            "memory_tb_per_s": Key("memory_bytes_per_s", "number", "TB/s of its memory.", scale=1e12, least=TINY),
            "sms": Key("sms", "count", "Units that the tiles of a matrix product are dealt to.", least=1),
            "watts": Key("watts", "number", "Watts at most; absent where not published.", default=0.0),
            "mamf_tflops": Key("mamf", "figures", "Measured achievable TFLOP/s.", default={}, scale=1e12, least=TINY),
            "source": SOURCE,
        },
        rule=rules.chip,
    ),
    "nodes": Section(
        Node,
        {
            "chip": Key("chip", "text", "The chip in it."),
            "chips": Key("chips", "count", "How many of them on one host.", least=1),
            "scale_up": Key("scale_up", "table", "The fast network among chips.", inside=SCALE_UP),
            "nics": Key("nics", "count", "Network cards (ports) for training traffic.", least=1),
            "nic_gbit_per_s": Key(
                "nic_bytes_per_s",
                "number",
                "Gbit/s one way per chip: its share of the cards.",
                scale=GIGABIT,
                least=TINY,
            ),
            "host_memory_gib": Key("host_memory_bytes", "number", "GiB of host memory.", default=0.0, scale=GIB),
            "host_link_gb_per_s": Key(
                "host_link_bytes_per_s", "number", "GB/s one way between a chip and its host.", default=0.0, scale=1e9
            ),
            "nvme_tb": Key("nvme_bytes", "number", "TB of local disks for data.", default=0.0, scale=1e12),
            "watts": Key("watts", "number", "Watts of the whole node at most.", default=0.0),
            "price": Key(
                "dollars_per_chip_hour", "table", "What a chip costs for an hour.", default=None, inside=PRICE
            ),
            "fabric": Key("fabric", "text", "The fabric it usually stands in."),
            "source": SOURCE,
        },
        rule=rules.node,
    ),
    "fabrics": Section(
        Fabric,
        {
            "kind": Key("kind", "text", "Its shape.", choices=("rail", "fat-tree", "torus", "dragonfly")),
            "technology": Key("technology", "text", "Such as NDR, XDR, HDR, RoCE, Slingshot, EFA, ICI."),
            "tiers": Key("tiers", "tables", "From near to far.", inside=TIER),
            "sharp": Key("sharp", "flag", "Whether the switches reduce.", default=False),
            "radix": Key("radix", "count", "Ports of a switch; absent where the tiers have their span.", default=0),
            "planes": Key("planes", "count", "Separate networks that share the cards of a node.", default=1, least=1),
            "larger": Key("larger", "text", "The fabric for clusters that outgrow this one.", default=""),
            "source": SOURCE,
        },
        rule=rules.fabric,
    ),
    "sites": Section(
        Site,
        {
            "pue": Key("pue", "number", "Power of the site over power of its computers.", least=1.0, most=5.0),
            "grams_co2_per_kwh": Key("grams_co2_per_kwh", "number", "Of the grid."),
            "dollars_per_kwh": Key("dollars_per_kwh", "number", "US dollars for electricity."),
            "source": SOURCE,
        },
    ),
}
