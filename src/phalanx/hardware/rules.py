"""Check the figures of one entry beyond the type of each: sums, orders and known names. A rule returns the key, its
value, what is wrong and the remedy."""

from __future__ import annotations

import difflib
import math
from typing import Any

Wrong = tuple[str, object, str, str] | None
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8", "nvfp4", "int8")


def chip(fields: dict[str, Any]) -> Wrong:
    peak, mamf = fields["peak"], fields["mamf"]
    for key, figures in (("peak_tflops", peak), ("mamf_tflops", mamf)):
        if strange := next((name for name in figures if name not in PRECISIONS), ""):
            near = difflib.get_close_matches(strange, PRECISIONS, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"the precisions are {', '.join(PRECISIONS)}"
            return key, strange, "there is no such precision", remedy
    if "bf16" not in peak:
        return "peak_tflops", list(peak), "bf16 is missing", "give it; the others are measured against it"
    for name, achieved in mamf.items():
        if achieved > peak.get(name, 0):
            remedy = f"give a peak_tflops for {name} that is higher"
            return "mamf_tflops", achieved / 1e12, f"more {name} was achieved than the peak allows", remedy
    return None


def scale_up(fields: dict[str, Any]) -> Wrong:
    dims, domain = fields["dims"], fields["domain"]
    if fields["shape"] == "torus" and math.prod(dims) != domain:
        return "dims", list(dims), f"its sides do not multiply to the domain, {domain}", "give the sides of the torus"
    if fields["link_bytes_per_s"] > fields["bytes_per_s"]:
        remedy = "gb_per_s is the sum over the links of a chip"
        return "link_gb_per_s", fields["link_bytes_per_s"] / 1e9, "a link is faster than all links", remedy
    return None


def price(fields: dict[str, Any]) -> Wrong:
    if not fields["low"] <= fields["median"] <= fields["high"]:
        return "median", fields["median"], "it is not between low and high", "order the three"
    return None


def node(fields: dict[str, Any]) -> Wrong:
    chips, domain = fields["chips"], fields["scale_up"].domain
    if domain % chips and chips % domain:
        remedy = f"a domain is whole nodes, or a node whole domains: take a multiple or a divisor of {chips}"
        return "scale_up.domain", domain, f"it does not fit nodes of {chips}", remedy
    return None


def fabric(fields: dict[str, Any]) -> Wrong:
    spans = [tier.span_nodes for tier in fields["tiers"]]
    factors = [tier.bytes_per_s_factor for tier in fields["tiers"]]
    given = [span for span in spans if span]
    if given != sorted(set(given)) or spans[len(spans) - len(given) :] != given or not (given or fields["radix"]):
        remedy = "give every tier a span_nodes, each wider than the one before, or the radix of the switches"
        return "tiers", spans, "the spans do not grow", remedy
    if 0 in spans and not fields["radix"]:
        remedy = "give it, or a span_nodes for every tier"
        return "radix", fields["radix"], "tiers without a span_nodes take it from the radix", remedy
    if fields["kind"] == "dragonfly" and spans.count(0) not in (0, 3):
        return "tiers", len(spans), "a dragonfly has three", "name the switch, the group and the system"
    if factors != sorted(factors, reverse=True):
        return "tiers", factors, "the factors grow with the distance", "what is narrow near stays narrow far"
    return None
