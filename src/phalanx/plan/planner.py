"""A plan: the chosen layout with its predicted memory, step time, goodput and bill, each with its interval. It combines
the results of the search, the cost model and the catalogue; it is immutable, hashed and exported as JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.core.shape import CONVENTIONS
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import evaluate
from phalanx.plan.cost.goodput import goodput
from phalanx.plan.cost.money import Bill, bill
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import OWN
from phalanx.plan.search.exhaustive import SLACK, Found
from phalanx.plan.search.objective import best
from phalanx.plan.search.space import Ask

# Llama 3 405B trained with 16 M tokens a step on 16,384 GPUs (arXiv:2407.21783), MegaScale with 12.6 M on 12,288
# (arXiv:2402.15627): 1,024 a chip. Smaller clusters have batches of about 4 M.
TOKENS_PER_CHIP, LEAST_TOKENS = 1024, 4e6
TOKENS_PER_PARAM = 20  # arXiv:2203.15556
MFU_PEAK = "of the chip's dense peak in the precision of the matmuls"


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    params: float
    hardware: str
    fabric: str
    site: str
    profile: str
    chips: int  # of the cluster
    used: int  # by the layout; the others are spares
    layout: dict[str, Any]
    compiled: bool  # fused kernels are assumed: `train.compile`
    global_batch: int  # samples
    seq: int
    micro_batches: int  # of a rank
    step_s: float
    step_low_s: float  # P5
    step_high_s: float  # P95
    seconds: dict[str, float]  # of a step, by term
    memory: dict[str, float]  # bytes of the fullest rank, by term
    memory_bytes: float
    memory_low_bytes: float  # P5
    memory_high_bytes: float  # P95: what has to fit
    capacity_bytes: float
    mfu: dict[str, float]  # by FLOP convention; "full" is what a run of `phalanx train` prints
    evidence: str  # what the intervals rest on
    pace: float  # factor that earlier runs on such chips applied to the prediction; 1: none
    tokens_per_s: float  # of the job, while it trains
    goodput: dict[str, float]
    goodput_low: float  # with the high failure rate and the slower recovery
    bill: Bill
    bill_high: Bill  # P95

    @property
    def margin(self) -> float:
        """Return the share of the memory that stays free at P95."""
        return 1 - self.memory_high_bytes / self.capacity_bytes

    @property
    def hash(self) -> str:
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"hash": self.hash, **dataclasses.asdict(self), "margin": self.margin}


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    ask: Ask
    tokens: float
    objective: str = "time"
    days: float = math.inf  # the most that the cheapest run may take
    assumed: tuple[str, ...] = field(default=())  # what the user left out


def usual_batch(chips: int, seq: int) -> int:
    """Return the batch in samples: the power of two nearest to the usual number of tokens."""
    samples = max(LEAST_TOKENS, TOKENS_PER_CHIP * chips) / seq
    return 2 ** max(0, round(math.log2(samples)))


def usual_tokens(shape: ModelShape) -> float:
    return float(TOKENS_PER_PARAM * shape.active_params)


def find(request: Request, ask: Ask | None = None, slack: float = SLACK) -> Found:
    """Find the best layouts for the request, or for `ask` in place of its question."""
    return best(ask or request.ask, request.objective, slack, request.days * 86_400 / request.tokens)


def costed(ask: Ask, given: Candidates) -> Found:
    """Cost the given layouts, whether or not they fit, and return them as if the search had found them."""
    batch = np.full(len(given), ask.batch)
    costs = evaluate(ask.shape, ask.cluster, given, batch, ask.profile)
    return Found(ask, given, batch, costs, np.asarray(costs.step_s), len(given), len(given), (given, batch))


def plan_of(request: Request, found: Found, row: int = 0) -> Plan:
    """Build the plan of one layout that was found."""
    ask, c, costs = found.ask, found.candidates.take([row]), _row(found, row)
    cluster, profile = ask.cluster, ask.profile
    usual = goodput(cluster, c, costs, ask.contains, rate=ask.failures)
    high = goodput(cluster, c, costs, ask.contains, "high", ask.failures)
    share, low_share = float(usual.share[0]), float(high.share[0])
    step = float(costs.step_s[0])
    mfu = {name: float(costs.mfu(name)[0]) for name in CONVENTIONS}
    early, late = profile.interval(bool(ask.shape.experts), str(found.candidates.row(row)["precision"]))
    memory_low, memory_high = (float(b[0]) for b in costs.memory_interval(profile))
    rate = float(costs.tokens[0]) / step
    # The two causes of a longer run are independent: the squares of their logarithms add up.
    worse = math.exp(math.hypot(late, math.log(max(share, 1e-300) / max(low_share, 1e-300))))
    start = float(usual.start_s[0])
    p50 = bill(cluster, request.tokens, rate * share, start)
    return Plan(
        model=request.model,
        params=float(ask.shape.params),
        hardware=cluster.node.name,
        fabric=cluster.fabric.name,
        site=cluster.site.name,
        profile=profile.name,
        chips=cluster.num_chips,
        used=int(c.world[0]),
        layout=found.candidates.row(row),
        compiled=bool(np.all(profile.software.fused))
        and profile.engine == OWN
        and not cluster.node.chip.name.startswith("cpu"),
        global_batch=int(found.batch[row]),
        seq=int(ask.shape.seq),
        micro_batches=int(costs.micro_batches[0]),
        step_s=step,
        step_low_s=step * max(math.exp(early), mfu["causal"]),  # no faster than the chip's peak
        step_high_s=step * math.exp(late),
        seconds={name: float(s[0]) for name, s in costs.seconds.items()},
        memory={name: float(b[0]) for name, b in costs.memory.items()},
        memory_bytes=float(costs.memory_bytes[0]),
        memory_low_bytes=memory_low,
        memory_high_bytes=memory_high,
        capacity_bytes=float(costs.capacity_bytes[0]),
        mfu=mfu,
        evidence=profile.evidence,
        pace=profile.pace,
        tokens_per_s=rate,
        goodput={f.name: np.asarray(getattr(usual, f.name))[0].item() for f in dataclasses.fields(usual)},
        goodput_low=low_share,
        bill=p50,
        bill_high=bill(cluster, request.tokens, rate * share / worse, start),
    )


def _row(found: Found, row: int) -> Any:
    """Return the costs of one row, as columns of length one."""
    parts = {}
    for f in dataclasses.fields(found.costs):
        value = getattr(found.costs, f.name)
        parts[f.name] = {k: v[row : row + 1] for k, v in value.items()} if isinstance(value, dict) else value[[row]]
    return type(found.costs)(**parts)
