"""Describe a plan in words and figures: rows for a screen, and every term with its formula. The command adds colours
and widths."""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.candidates import PRECISIONS
from phalanx.plan.cost.evaluate import TERMS
from phalanx.plan.cost.goodput import figures
from phalanx.plan.cost.money import DRAWN
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.rank_bytes import TERMS as MEMORY_TERMS
from phalanx.plan.planner import MFU_PEAK, Plan
from phalanx.plan.search.advice import Change, changed_axes, differences

Row = tuple[str, str, float, str]  # name, value, share of the whole (0..1), formula or note


def seconds_text(s: float) -> str:
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if s >= 2 * size:
            return f"{s / size:,.1f} {unit}"
    return f"{s:.3g} s" if s >= 1 else f"{1000 * s:.3g} ms"


def count_text(n: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:,.0f}"


def layout_text(plan: Plan) -> str:
    at = plan.layout
    pipe = f" ({at['vpp']} chunks each)" if at["vpp"] > 1 else ""
    axes = [
        f"tp {at['tp']}",
        f"cp {at['cp']}",
        f"shard {at['shard']}",
        f"pp {at['pp']}{pipe}",
        f"replica {at['replica']}",
    ]
    shown = [a for a in axes if a.split()[1] != "1"] or ["one rank"]
    experts = f", ep {at['ep']}" if at["ep"] > 1 else ""
    return f"{' x '.join(shown)}{experts} = {plan.used:,} chips"


def choices_text(plan: Plan) -> str:
    at = plan.layout
    schedule = f"{at['schedule']}, " if at["pp"] > 1 else ""
    return (
        f"zero {at['zero']}, {schedule}micro-batch {at['micro_batch']} x {plan.micro_batches} per rank, recompute "
        f"{at['recompute']}, {at['precision']}, buckets of {at['bucket_bytes'] / 1e6:.0f} MB"
    )


def memory_rows(plan: Plan) -> list[Row]:
    rows = [(n, f"{b / 1e9:.2f} GB", b / plan.capacity_bytes, MEMORY_TERMS.get(n, "")) for n, b in plan.memory.items()]
    return [row for row in rows if row[2] > 0]


def step_rows(plan: Plan) -> list[Row]:
    order = [n for n in TERMS if n in plan.seconds] + [n for n in plan.seconds if n not in TERMS]
    rows = [(n, seconds_text(plan.seconds[n]), plan.seconds[n] / plan.step_s, TERMS.get(n, "")) for n in order]
    return [row for row in rows if row[2] > 5e-4]


def goodput_rows(plan: Plan) -> list[tuple[str, str, str]]:
    g = plan.goodput
    stops = figures()["stops"]
    how = "the other replicas continue, and it joins them later" if g["contained"] else "all stop and restart"
    heal = [
        (
            "healing",
            seconds_text(g["heal_s"]),
            f"{stops['heal_s']:.0f} s + communicators of a replica",
        )
    ]
    return [
        ("start", seconds_text(g["start_s"]), "communicators, once; contained replicas have their own"),
        ("MTBF", seconds_text(g["mtbf_s"]), f"1 / (failures per chip x {plan.used:,} chips); {_rate()}"),
        ("checkpoint", seconds_text(g["checkpoint_s"]), "copy to the host beside the next step: the excess + 15 %"),
        ("interval", seconds_text(g["interval_s"]), "sqrt(2 C M) with Daly's correction, at least a step"),
        ("stop", seconds_text(g["stop_s"]), f"per failure; {how}"),
        *(heal if g["contained"] else []),
        ("goodput", f"{g['share']:.2%}", _share(bool(g["contained"]))),
        ("at worst", f"{plan.goodput_low:.2%}", "highest published failure rate, slowest published recovery (P95)"),
    ]  # fmt: skip


def _rate() -> str:
    table = figures()
    return str(table["rates"][table["choice"]["usual"]]["source"])


def _share(contained: bool) -> str:
    return (
        "T/(T+C) x e^(-stop/M) / (1 + healing/(M x replicas))"
        if contained
        else "T / (M e^(stop/M) (e^((T+C)/M) - 1)) (Daly 2006)"
    )


def bill_rows(plan: Plan) -> list[tuple[str, str, str]]:
    b, high = plan.bill, plan.bill_high
    rows = [
        ("days", f"{b.days:,.1f} (P95 {high.days:,.1f})", "tokens / (tokens/s x goodput) + start"),
        ("chip-hours", count_text(b.chip_hours), "days x 24 x all chips"),
    ]
    if b.dollars is not None and b.dollars_low is not None and b.dollars_high is not None:
        dollars = f"${count_text(b.dollars)} (${count_text(b.dollars_low)} to ${count_text(b.dollars_high)})"
        rows.append(("rent", dollars, "chip-hours x median of list prices (lowest to highest)"))
    else:
        rows.append(("rent", "-", "the catalogue has no price for these chips"))
    if b.mwh is None or b.tonnes_co2 is None or b.electricity_dollars is None:
        return [*rows, ("energy", "-", "the catalogue has no power for these chips")]
    return [
        *rows,
        ("energy", f"{b.mwh:,.0f} MWh", f"{DRAWN:.0%} of rated power (arXiv:2506.14551) x PUE of {plan.site}"),
        ("electricity", f"${count_text(b.electricity_dollars)}", f"at the price of {plan.site}"),
        ("carbon", f"{b.tonnes_co2:,.0f} t CO2", f"grid of {plan.site}"),
    ]  # fmt: skip


RATES = {
    "attention_fwd": "of the bf16 peak, forward",
    "attention_bwd": "of the bf16 peak, backward",
    "memory": "of the memory bandwidth",
    "up": "of the scale-up links",
    "nic": "of the network cards",
    "exchange": "of the links, in the exchange of experts",
    "hides_tp": "share of tensor-parallel communication behind products",
    "hides_ep": "share of the exchange of experts behind compute",
}
FACTS = ("attention", "dispatcher", "graphs", "grad_bytes", "scatter_bytes", "logit_bytes")


def profile_rows(profile: Profile) -> list[list[str]]:
    """List the speeds and the facts about the software that a plan assumes."""
    products = dict(zip(PRECISIONS, np.asarray(profile.gemm).tolist(), strict=True))
    rows = [["products", f"{products['bf16']:.3g}", f"of the bf16 peak ({products['fp8']:.3g} of the fp8 peak)"]]
    rows += [[name, f"{float(getattr(profile, name)):.3g}", what] for name, what in RATES.items()]
    return rows + [[name, str(getattr(profile.software, name)), "fact of the software"] for name in FACTS]


def mfu_text(plan: Plan) -> str:
    m = plan.mfu
    others = f"{m['causal']:.1%} causal, {m['6N']:.1%} as 6N"
    return f"{m['full']:.1%} (attention in full, as a run prints it; {others}), {MFU_PEAK}"


def reason_text(best: Plan, other: Plan) -> str:
    """Explain why a layout lost: the terms that take longer in it."""
    wall = (other.step_s / other.global_batch / other.goodput["share"]) / (
        best.step_s / best.global_batch / best.goodput["share"]
    ) - 1
    terms = [f"{name} {gap:+.3g} s" for name, gap in differences(best, other)[:4]]
    if abs(other.goodput["share"] - best.goodput["share"]) > 1e-3:
        terms.append(f"goodput {other.goodput['share'] - best.goodput['share']:+.1%}")
    return f"{changed_axes(best, other)}: {wall:+.1%} time ({', '.join(terms) or 'no term differs by a thousandth'})"


def change_text(change: Change) -> str:
    return f"{change.what}: {change.gain:+.1%}"
