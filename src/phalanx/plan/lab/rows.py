"""Reads one row of published runs. What the row leaves open stays open: every sensible value is an option with a
weight, and none is chosen to fit."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue, Cluster
from phalanx.plan.cost import software as engines
from phalanx.plan.cost.candidates import RECOMPUTE, SCHEDULES
from phalanx.plan.cost.sizes import ModelShape, hardware_flops_sc21
from phalanx.plan.cost.software import Software
from phalanx.plan.known_models import shape_of
from phalanx.plan.lab.prose import PRECISIONS, chip_of, precision_of
from phalanx.plan.lab.runs import Option, RowError, Run

RECOMPUTED = (  # the first match wins: full and none match at the beginning, selective anywhere
    ("full", r"full|yes|true|block|uniform|all\b"),
    ("none", r"none|no\b|not|false|0$|off\b"),
    (
        "selective",
        r".*(selective|partial|minimal|save|remat|recomp|attn|attention|core|mlp|moe|norm|layer|act|proj|op\b)",
    ),
)
LIMITS = {"layers": 10_000, "hidden": 10**6, "heads": 10**5, "kv_heads": 10**5, "ffn": 10**7, "vocab": 10**8}
LIMIT = 10**8  # for other whole numbers
WHOLE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
ROUTED = ("experts", "top_k", "expert_ffn", "dense_layers", "mtp")
Weighed = list[tuple[int, float]]


class RowReader:
    def __init__(self, number: int, text: dict[str, str], catalogue: Catalogue):
        self.number, self.text, self.catalogue = number, text, catalogue
        self.out_of_memory = text["out_of_memory"] == "yes"

    def run(self) -> Run:
        engine = self.text["software"]
        if engine not in engines.names():
            raise RowError(f"software = {engine!r} is none of {', '.join(engines.names())}")
        shape = self._shape(engine)
        chip = self._chip()
        gpus = self._count("num_gpus")
        if not gpus:
            raise RowError("num_gpus is empty")
        cluster = self._cluster(chip, gpus)
        precision = self._precision()
        options, batch = self._options(shape, gpus, precision, chip.startswith("tpu"))
        step_s = self._step_s(shape, cluster, batch, gpus, precision)
        peak = self._number("peak_gb")
        return Run(
            self.number, self.text["source"], self.text["model"], engine, self._software(engine), chip, shape, cluster,
            options, batch, step_s, self._stratum(shape, chip, precision), peak * 1e9 if peak else None,
            self.out_of_memory,
        )  # fmt: skip

    def _software(self, engine: str) -> Software:
        """Return the engine's facts, with those that the row states."""
        more: dict[str, object] = {}
        for field in fields(Software):
            value = self.text.get("compiled" if field.name == "fused" else field.name, "")
            if value:
                more[field.name] = {"yes": True, "no": False}.get(value, value)
        if "trained" in more:
            more["trained"] = self._number("trained")
        return engines.software(engine, **more)

    def _number(self, name: str) -> float | None:
        value = self.text[name]
        if not value or value.lower() in ("n/a", "na", "-", "none", "null"):
            return None
        try:
            number = float(value.replace(",", "").rstrip("%"))
        except ValueError as error:
            raise RowError(f"{name} = {value!r} is no number") from error
        if not 0 <= number < 1e18 or (number == 0 and name not in ("zero_stage", "mtp", "dense_layers")):
            raise RowError(f"{name} = {value!r} is not a sensible number; leave it empty where it is not known")
        return number / 100 if value.endswith("%") else number

    def _count(self, name: str) -> int:
        """Read a whole number; 0 if there is none."""
        number = self._number(name) or 0.0
        if number != int(number):
            raise RowError(f"{name} = {self.text[name]!r} is not a whole number")
        if number > LIMITS.get(name, LIMIT):
            raise RowError(f"{name} = {self.text[name]!r} is not a sensible number")
        return int(number)

    def _shape(self, engine: str) -> ModelShape:
        sizes = {name: self._count(name) for name in WHOLE}
        seq = self._count("seq_len") or (2048 if engine == "maxtext" else 4096)
        if 0 < sizes["hidden"] < sizes["heads"]:
            raise RowError(f"heads = {sizes['heads']} is more than hidden = {sizes['hidden']}")
        routed = {name: self._count(name) for name in ROUTED if self.text[name]}
        if routed.get("expert_ffn"):
            routed["shared_ffn"] = self._count("shared_experts") * routed["expert_ffn"]
        shape = shape_of(self.text["model"], sizes, self._number("params_b"), routed, seq)
        if shape is None:
            raise RowError(f"the sizes of {self.text['model']!r} are neither in the row nor known, nor its params_b")
        return shape

    def _chip(self) -> str:
        if not re.sub(r"[^A-Za-z0-9]", "", self.text["gpu"]):
            raise RowError("gpu is empty")
        return chip_of(self.text["gpu"])

    def _cluster(self, chip: str, gpus: int) -> Cluster:
        node = self.catalogue.node(chip)
        share = gpus < node.chips and node.chips % gpus == 0
        whole = gpus if share else -(-gpus // node.chips) * node.chips  # a part of the last node is idle
        asked = self.text["fabric"]
        fabric = next((name for name in self.catalogue.fabrics if asked and asked in name), None)
        try:
            cluster = self.catalogue.cluster(chip, whole, fabric=fabric)
        except UserError:
            # It ran, so the network was larger than the usual one: extend the last tier of the usual one.
            usual = self.catalogue.cluster(chip, node.chips)
            last = replace(usual.fabric.tiers[-1], span_nodes=whole)
            larger = replace(usual.fabric, tiers=(*usual.fabric.tiers[:-1], last))
            cluster = replace(usual, nodes=whole // node.chips, fabric=larger)
        return self._as_stated(cluster)

    def _as_stated(self, cluster: Cluster) -> Cluster:
        """Replace the memory and the network cards with those that the row itself states."""
        node, chip = cluster.node, cluster.node.chip
        size, rate, cards = (self._number(name) for name in ("memory_gb", "memory_tb_per_s", "nic_gbit"))
        if size and abs(size * 2**30 / chip.memory_bytes - 1) > 0.1:  # not the catalogue's chip of that name
            chip = replace(chip, memory_bytes=int(0.985 * size * 2**30))
        if rate:
            chip = replace(chip, memory_bytes_per_s=rate * 1e12)
        if cards:
            node = replace(node, nic_bytes_per_s=cards / 8 * 1e9)
        return replace(cluster, node=replace(node, chip=chip))

    def _precision(self) -> str:
        found = precision_of(self.text["precision"])
        if found is None:
            names = ", ".join(name for name, _ in PRECISIONS)
            raise RowError(f"precision = {self.text['precision']!r} is none of {names}")
        return found

    def _recompute(self) -> list[tuple[str, float]]:
        text = self.text["recompute"]
        if not text:
            return [(mode, 1.0) for mode in RECOMPUTE]
        found = next((mode for mode, pattern in RECOMPUTED if re.match(pattern, text, re.I)), None)
        if found is None:
            raise RowError(f"recompute = {text!r} is none of {', '.join(RECOMPUTE)}")
        return [(found, 1.0)]

    def _options(self, shape: ModelShape, gpus: int, precision: str, tpu: bool) -> tuple[tuple[Option, ...], int]:
        tp, pp, cp, ep = (self._count(n) or 1 for n in ("tp", "pp", "cp", "ep"))
        if gpus % (tp * pp * cp):
            raise RowError(f"tp {tp} x pp {pp} x cp {cp} does not divide {gpus} GPUs")
        dp = gpus // (tp * pp * cp)
        shard = self._shard(dp)
        batch, zero = self._count("global_batch"), self.text["zero_stage"]
        micros = self._micro_batches(batch, dp, pp, int(shape.seq))
        if not batch:
            batch = micros[-1][0] * dp
            micros = [(b, w) for b, w in micros if batch % (b * dp) == 0]
        tps: Weighed = [(tp, 1.0)]
        if tpu and not self.text["tp"]:  # XLA shards as it is told, and the row does not say how
            tps = [(t, 1.0) for t in (1, 2, 4, 8, 16) if shard % t == 0 and shape.heads >= t]
        zeros: Weighed = [(self._count("zero_stage"), 1.0)] if zero else [(3, 1.0)] if tpu else [(1, 0.8), (0, 0.2)]
        if self._count("zero_stage") > 3:
            raise RowError(f"zero_stage = {zero!r} is none of 0, 1, 2, 3")
        vpp = self._count("vpp")
        vpps: Weighed = [(vpp, 1.0)] if vpp else _chunks(int(shape.layers), pp)
        asked = self.text["schedule"]
        if asked and asked not in SCHEDULES:
            raise RowError(f"schedule = {asked!r} is none of {', '.join(SCHEDULES)}")
        options = []
        choices = itertools.product(micros, vpps, self._recompute(), zeros, tps)
        for (b, wb), (v, wv), (mode, wm), (z, wz), (t, wt) in choices:
            etp = self._etp(shape, t, ep, tp * cp * shard)
            layout: dict[str, int | str | float] = {
                "tp": t, "pp": pp, "vpp": v, "cp": cp, "ep": ep, "etp": etp,
                "replica": dp // shard, "shard": shard * tp // t, "zero": z, "micro_batch": b, "recompute": mode,
                "precision": precision, "bucket_bytes": 80e6,
                "schedule": asked or ("interleaved" if v > 1 else "1f1b"),
            }  # fmt: skip
            options.append(Option(layout, wb * wv * wm * wz * wt))
        return tuple(options), batch

    def _shard(self, dp: int) -> int:
        """Return how many ranks state is sharded over: all data ranks, or a stated number or part of them."""
        text = self.text["shard"]
        if text.startswith("1/"):
            parts = int(text[2:])
            return dp // parts if dp % parts == 0 else dp
        shard = self._count("shard") or dp
        return shard if dp % shard == 0 else dp

    def _etp(self, shape: ModelShape, tp: int, ep: int, ranks: int) -> int:
        """Return the stated value, or split as Megatron-LM does: wide experts like the rest, fine-grained ones not."""
        etp = self._count("etp") or (tp if shape.experts and shape.expert_ffn > 4096 else 1)
        while etp > 1 and ranks % (ep * etp):
            etp //= 2
        return etp

    def _micro_batches(self, batch: int, dp: int, pp: int, seq: int) -> Weighed:
        """Return the published size, or 1 to 16 with at most 32,768 tokens: a pipeline wants small ones."""
        micro = self._count("micro_batch")
        if micro:
            if batch and batch < micro * dp:
                raise RowError(f"micro_batch {micro} x {dp} data ranks is more than global_batch {batch}")
            return [(micro, 1.0)]
        if batch and batch < dp:
            raise RowError(f"{dp} data ranks are more than global_batch {batch}")
        sizes = [b for b in (1, 2, 4, 8, 16) if b == 1 or b * seq <= 32768]
        sizes = [b for b in sizes if batch % (b * dp) == 0] or [1]
        return [(b, 1.0 / b if pp > 1 else 1.0) for b in sizes]

    def _step_s(self, shape: ModelShape, cluster: Cluster, batch: int, gpus: int, precision: str) -> float:
        """Derive the step time from a figure in the row, preferring the one closest to a clock."""
        names = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        step, rate, tflops, mfu = (self._number(name) for name in names)
        tokens = batch * float(shape.seq)
        if step:
            return step
        if rate:
            return tokens / (rate * gpus)
        if not (tflops or mfu):
            if self.out_of_memory:
                return float("nan")
            raise RowError(f"no {', '.join(names)} to compare with")
        flops = tokens * self._flops(shape)
        if not tflops:
            assert mfu
            share = mfu / 100 if mfu > 1.5 else mfu
            tflops = share * self._peak(cluster, precision) / 1e12
        return flops / (tflops * 1e12 * gpus)

    def _flops(self, shape: ModelShape) -> float:
        """Return the FLOPs per token, by the row's convention."""
        convention = self.text["flops"] or "full"
        if convention == "hardware":
            return float(hardware_flops_sc21(shape)) * (1.0 if self.text["recompute"].startswith("full") else 0.75)
        return float(shape.flops_per_token(convention))

    def _peak(self, cluster: Cluster, precision: str) -> float:
        """Return the peak that the row's MFU refers to: as stated, or the chip's in the row's precision."""
        stated, peaks = self.text["peak_tflops"], cluster.node.chip.peak
        if stated and stated != "bf16":
            return float(stated) * 1e12
        wide = stated == "bf16" or precision in ("bf16", "fp32")
        return peaks["bf16"] if wide else peaks.get("fp8", peaks["bf16"])

    def _stratum(self, shape: ModelShape, chip: str, precision: str) -> str:
        if self.text["trained"]:
            return "LoRA"
        if chip.startswith("tpu"):
            return "TPU"
        if shape.experts:
            return "MoE"
        if precision not in ("bf16", "fp32"):
            return "fp8"
        known = ["tp", "pp", "global_batch", "micro_batch", "seq_len", "layers"]
        known += ["vpp"] if (self._count("pp") or 1) > 1 else []
        return "dense bf16, complete" if all(self.text[name] for name in known) else "dense bf16, incomplete"


def _chunks(layers: int, pp: int) -> Weighed:
    """Guess unpublished model chunks per pipeline rank: none, or as many as divide the layers. If the pipeline itself
    does not divide them, embedding and head take the place of a layer each."""
    if pp == 1:
        return [(1, 1.0)]
    slots = layers if layers % pp == 0 else layers + 2
    more = [v for v in range(2, 13) if slots % (pp * v) == 0]
    return [(1, 1.0)] + [(v, 1.0 / len(more)) for v in more]
