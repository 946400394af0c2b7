"""Reads one row of published runs. What it leaves open stays open: every sensible value is an option with a weight,
none is chosen to fit. What notes say about conventions, networks and software is read from their words."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue, Cluster
from phalanx.plan.candidates import RECOMPUTE
from phalanx.plan.model import ModelShape, hardware_flops_sc21
from phalanx.plan.names import known_model, shape_of
from phalanx.plan.runs import Option, RowError, Run

# What a table calls a chip -> hardware of the catalogue; the first whose pattern is found wins.
CHIPS = (
    (r"h100.*(96 ?gb|hbm2e)", "h100-hbm2e"),
    *((name, name) for name in ("gb300", "gb200", "gh200", "b300", "b200", "h200", "h800", "h100")),
    (r"a100.*(?<!\d)40 ?gb", "a100-40"),
    (r"a100", "a100-80"),
    (r"a800", "a800"),
    *((name, name) for name in ("mi355x", "mi325x", "mi300x", "mi250x", "v100", "gaudi3", "gaudi2", "trn2")),
    (r"trainium ?2", "trn2"),
    (r"tpu.*v5p|^v5p", "tpu-v5p"),
    (r"tpu.*v5( ?lite|e)|^v5( ?lite|e)", "tpu-v5e"),
    (r"trillium|tpu.*v6e|^v6e", "tpu-v6e"),
    (r"tpu.*v4|^v4", "tpu-v4"),
)
SOFTWARE = (
    ("megascale", r"\[megascale\]"),
    ("maxtext", r"maxtext|\bjax\b"),
    ("llm-foundry", r"llm-foundry|mosaic|composer"),
    ("torchtitan", r"torchtitan"),
    ("deepspeed", r"deepspeed"),
    ("megatron-2022", r"sc21|2104\.04473|2205\.05198|bloom|mt-nlg"),
    ("megatron", r"megatron|nemo|dgxc|llama 3 herd|megascale|bridge"),
)
OUT_OF_MEMORY = r"\bOOM\b|out of memory|ran out of"
PRECISIONS = (
    ("nvfp4", "fp4"), ("mxfp8", "mx"), ("fp8", "fp8|float8|f8"), ("fp32", "^(fp32|float32|tf32)$"),
    ("bf16", "^$|16|half|mixed|amp"),
)  # fmt: skip
RECOMPUTED = (  # the first whose pattern is found at the beginning, and then anywhere
    ("full", r"full|yes|true|block|uniform|all\b"),
    ("none", r"none|no\b|not|false|0$|off\b"),
    (
        "selective",
        r".*(selective|partial|minimal|save|remat|recomp|attn|attention|core|mlp|moe|norm|layer|act|proj|op\b)",
    ),
)
LIMITS = {"layers": 10_000, "hidden": 10**6, "heads": 10**5, "kv_heads": 10**5, "ffn": 10**7, "vocab": 10**8}
LIMIT = 10**8  # of other whole numbers
Weighed = list[tuple[int, float]]


class RowReader:
    def __init__(self, number: int, text: dict[str, str], catalogue: Catalogue):
        self.number, self.text, self.catalogue = number, text, catalogue
        self.notes = text["notes"]
        self.out_of_memory = bool(re.search(OUT_OF_MEMORY, self.notes, re.I))

    def run(self) -> Run:
        software = self._software()
        if software == "megatron-2022" and self.text["zero_stage"] == "3":
            software = "zero3-2021"  # the paper's baseline is other software
        shape = self._shape(software)
        chip = self._chip()
        gpus = self._count("num_gpus")
        if not gpus:
            raise RowError("num_gpus is empty")
        cluster = self._cluster(chip, gpus)
        precision = self._precision()
        options, batch = self._options(shape, gpus, precision, chip.startswith("tpu"))
        step_s = self._step_s(shape, cluster, batch, gpus, precision)
        family = known_model(self.text["model"]).get("name", "")
        return Run(
            self.number, self.text["source"], self.text["model"], software + ("-moe" if shape.experts else ""), family,
            chip, shape, cluster, options, batch, step_s, self._stratum(shape, chip, precision), self._traits(),
            self._peak_bytes(), self.out_of_memory,
        )  # fmt: skip

    def _software(self) -> str:
        """That the row names, or its notes do; else what is usual for such a layout on such a chip."""
        for about in (f"{self.text['source']} {self.text['model']}", self.notes):
            for name, pattern in SOFTWARE:
                if re.search(pattern, about, re.I):
                    return name
        if self._chip().startswith("tpu"):
            return "maxtext"
        return "torchtitan" if self.text["zero_stage"] == "3" and self.text["pp"] in ("", "1") else "megatron"

    def _number(self, name: str) -> float | None:
        value = self.text[name]
        if not value or value.lower() in ("n/a", "na", "-", "none", "null"):
            return None
        try:
            number = float(value.replace(",", "").rstrip("%"))
        except ValueError as error:
            raise RowError(f"{name} = {value!r} is no number") from error
        if not 0 <= number < 1e18 or (number == 0 and name != "zero_stage"):
            raise RowError(f"{name} = {value!r} is not a sensible number; leave it empty where it is not known")
        return number / 100 if value.endswith("%") else number

    def _count(self, name: str) -> int:
        """A whole number; 0 where there is none."""
        number = self._number(name) or 0.0
        if number != int(number):
            raise RowError(f"{name} = {self.text[name]!r} is not a whole number")
        if number > LIMITS.get(name, LIMIT):
            raise RowError(f"{name} = {self.text[name]!r} is not a sensible number")
        return int(number)

    def _shape(self, software: str) -> ModelShape:
        sizes = {name: self._count(name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
        seq = self._count("seq_len") or (2048 if software == "maxtext" else 4096)
        if 0 < sizes["hidden"] < sizes["heads"]:
            raise RowError(f"heads = {sizes['heads']} is more than hidden = {sizes['hidden']}")
        shape = shape_of(self.text["model"], sizes, self._number("params_b"), self.notes, seq)
        if shape is None:
            raise RowError(f"the sizes of {self.text['model']!r} are neither in the row nor known, nor its params_b")
        return shape

    def _chip(self) -> str:
        plain = re.sub(r"[^a-z0-9]+", " ", self.text["gpu"].lower()).strip()
        if not plain:
            raise RowError("gpu is empty")
        return next((chip for pattern, chip in CHIPS if re.search(pattern, plain)), self.text["gpu"])

    def _cluster(self, chip: str, gpus: int) -> Cluster:
        node = self.catalogue.node(chip)
        share = gpus < node.chips and node.chips % gpus == 0
        whole = gpus if share else -(-gpus // node.chips) * node.chips  # a part of the last node is idle
        wide = re.search(r"1:7 oversubscription", self.notes)
        fabric = next((name for name in self.catalogue.fabrics if wide and re.search("llama-?3", name)), None)
        try:
            cluster = self.catalogue.cluster(chip, whole, fabric=fabric)
        except UserError:
            # It ran, so a larger network than the usual one was there: that one's last tier goes on.
            usual = self.catalogue.cluster(chip, node.chips)
            last = replace(usual.fabric.tiers[-1], span_nodes=whole)
            fabric_there = replace(usual.fabric, tiers=(*usual.fabric.tiers[:-1], last))
            cluster = replace(usual, nodes=whole // node.chips, fabric=fabric_there)
        return _as_stated(cluster, self.text["gpu"], self.notes)

    def _precision(self) -> str:
        text = self.text["precision"].lower()
        found = next((name for name, pattern in PRECISIONS if re.search(pattern, text)), None)
        if found is None:
            raise RowError(f"precision = {text!r} is none of {', '.join(name for name, _ in PRECISIONS)}")
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
        slices = int(next(iter(re.findall(r"(\d+) (?:x v\w+-\d+ )?slice", self.notes)), 1))
        group = re.search(r"FSDP=(\d+)|ici_fsdp=(\d+)", self.notes)
        shard = int(group[1] or group[2]) if group else dp // slices if dp % slices == 0 else dp
        shard = shard if dp % shard == 0 else dp
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
        options = []
        choices = itertools.product(micros, vpps, self._recompute(), zeros, tps)
        for (b, wb), (v, wv), (mode, wm), (z, wz), (t, wt) in choices:
            etp = self._etp(shape, t, ep, tp * cp * shard)
            layout: dict[str, int | str | float] = {
                "tp": t, "pp": pp, "vpp": v, "cp": cp, "ep": ep, "etp": etp,
                "replica": dp // shard, "shard": shard * tp // t, "zero": z, "micro_batch": b, "recompute": mode,
                "precision": precision, "bucket_bytes": 40e6, "schedule": "interleaved" if v > 1 else "1f1b",
            }  # fmt: skip
            options.append(Option(layout, wb * wv * wm * wz * wt))
        return tuple(options), batch

    def _etp(self, shape: ModelShape, tp: int, ep: int, ranks: int) -> int:
        """Stated, or as in Megatron-LM: wide experts are split like the rest, fine-grained ones are not."""
        stated = re.search(r"ETP ?= ?(\d+)", self.notes)
        etp = int(stated[1]) if stated else tp if shape.experts and shape.expert_ffn > 4096 else 1
        while etp > 1 and ranks % (ep * etp):
            etp //= 2
        return etp

    def _micro_batches(self, batch: int, dp: int, pp: int, seq: int) -> Weighed:
        """The published one, or 1 to 16 with 32,768 tokens at most: a pipeline wants small ones."""
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
        """From whichever the row gives, the closest to a clock first."""
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
        flops = tokens * flops_counted(shape, self.notes, self.text["recompute"])
        if not tflops:
            assert mfu
            share = mfu / 100 if mfu > 1.5 else mfu
            tflops = share * self._peak(cluster, precision) / 1e12
        return flops / (tflops * 1e12 * gpus)

    def _peak(self, cluster: Cluster, precision: str) -> float:
        """What the row's MFU is a share of: as stated, or the chip's in the row's precision."""
        stated = re.search(r"peaks (\d+)/(\d+)", self.notes)
        if stated:
            return float(stated[1 if precision == "bf16" else 2]) * 1e12
        peaks = cluster.node.chip.peak
        return (
            peaks["bf16"]
            if precision in ("bf16", "fp32") or "bf16 peak" in self.notes
            else peaks.get("fp8", peaks["bf16"])
        )

    def _stratum(self, shape: ModelShape, chip: str, precision: str) -> str:
        if re.search("lora", self.notes + self.text["source"], re.I):
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

    def _traits(self) -> dict[str, float | bool]:
        """Facts about the software that the notes state; what is usual for it is in profiles.py."""
        stated: tuple[tuple[str, str, float | bool], ...] = (
            (r"no sequence parallel", "sequence_parallel", False),
            (r"vanilla tp", "hides_tp", 0.0),
            (r"async ?tp", "hides_tp", 0.6),
            (r"\beager\b", "fused", False),
            (r"\blora\b", "trained", 0.02),
            (r"offload of activations", "offload", True),
        )
        return {name: value for pattern, name, value in stated if re.search(pattern, self.notes, re.I)}

    def _peak_bytes(self) -> float | None:
        found = re.search(r"peak mem(?:ory)? ([\d.]+) ?(GiB|GB)", self.notes, re.I)
        return float(found[1]) * (2**30 if found[2] == "GiB" else 1e9) if found else None


def flops_counted(shape: ModelShape, notes: str, recompute: str) -> float:
    """FLOPs per token by the convention that the notes state. Unless they do, attention counts in full (Megatron-LM
    until 2024, PaLM, torchtitan, MaxText, llm-foundry)."""
    if re.search(r"hardware[ -]flop", notes, re.I):
        return float(hardware_flops_sc21(shape)) * (1.0 if recompute.startswith("full") else 0.75)
    if re.search(r"\b6N\b", notes):
        return float(shape.flops_per_token("6N"))
    causal = re.search(r"(?<!non-)(?<!non)causal", notes, re.I)
    return float(shape.flops_per_token("causal" if causal else "full"))


def _chunks(layers: int, pp: int) -> Weighed:
    """Model chunks per pipeline rank, when not published: none, or as many as divide the layers; where the pipeline
    itself does not, embedding and head take the place of a layer each."""
    if pp == 1:
        return [(1, 1.0)]
    slots = layers if layers % pp == 0 else layers + 2
    more = [v for v in range(2, 13) if slots % (pp * v) == 0]
    return [(1, 1.0)] + [(v, 1.0 / len(more)) for v in more]


def _as_stated(cluster: Cluster, gpu: str, notes: str) -> Cluster:
    """With the memory and the network cards that the row itself states."""
    node, chip = cluster.node, cluster.node.chip
    size = re.search(r"(\d+)\s?GB", gpu)
    if size and abs(int(size[1]) * 2**30 / chip.memory_bytes - 1) > 0.1:  # not the catalogue's chip of that name
        chip = replace(chip, memory_bytes=int(0.985 * int(size[1]) * 2**30))
    rate = re.search(r"([\d.]+)\s?TB/s HBM", notes)
    if rate and "H200" not in gpu:
        chip = replace(chip, memory_bytes_per_s=float(rate[1]) * 1e12)
    cards = re.search(r"(\d+)x(\d+)Gb/s per node", notes)
    if cards:
        node = replace(node, nic_bytes_per_s=int(cards[1]) * int(cards[2]) / 8 * 1e9 / node.chips)
    return replace(cluster, node=replace(node, chip=chip))
