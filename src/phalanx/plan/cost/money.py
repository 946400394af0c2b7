"""The bill of a run: days, dollars, megawatt-hours, tonnes of CO2. Figures that the catalogue lacks stay None."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import UserError
from phalanx.hardware import Cluster

LONGEST_S = 3e11  # ten thousand years
# Share of the node's rated power in training: arXiv:2506.14551, 8 x H100, the most intensive runs at 76 % of 10.2 kW.
DRAWN = 0.76


@dataclass(frozen=True, slots=True)
class Bill:
    tokens: float
    seconds: float  # of wall clock
    chip_hours: float
    dollars: float | None  # at the median price
    dollars_low: float | None
    dollars_high: float | None
    mwh: float | None  # of the site, cooling included
    tonnes_co2: float | None
    electricity_dollars: float | None  # included in a rented chip's price; paid separately for your own

    @property
    def days(self) -> float:
        return self.seconds / 86_400

    @property
    def joules_per_token(self) -> float | None:
        return None if self.mwh is None else self.mwh * 3.6e9 / self.tokens


def watts(cluster: Cluster) -> float | None:
    """Return the power of the whole cluster in training, without cooling; None if it is not published."""
    node = cluster.node
    rated = node.watts or node.chips * node.chip.watts
    return DRAWN * rated * cluster.nodes if rated else None


def bill(cluster: Cluster, tokens: float, tokens_per_s: float, start_s: float = 0.0) -> Bill:
    """Compute the bill at the job's `tokens_per_s`, failures included. Spare chips are paid for too."""
    if not tokens_per_s * LONGEST_S > tokens:
        raise UserError(
            "with so many failures the run makes no progress",
            field="failures",
            value=f"{tokens_per_s:.3g} tokens/s are left of what was asked for",
            remedy="take fewer chips, or software that continues without what failed (--software phalanx)",
        )
    seconds = start_s + tokens / tokens_per_s
    hours = seconds / 3600
    price, power, site = cluster.node.dollars_per_chip_hour, watts(cluster), cluster.site
    chip_hours = hours * cluster.num_chips
    mwh = None if power is None else power * hours * site.pue / 1e6
    return Bill(
        tokens,
        seconds,
        chip_hours,
        dollars=price.median * chip_hours if price else None,
        dollars_low=price.low * chip_hours if price else None,
        dollars_high=price.high * chip_hours if price else None,
        mwh=mwh,
        tonnes_co2=None if mwh is None else mwh * site.grams_co2_per_kwh / 1000,
        electricity_dollars=None if mwh is None else mwh * 1000 * site.dollars_per_kwh,
    )
