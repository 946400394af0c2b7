"""Turns the prose of a table into columns: software, conventions and facts stated in `source`, `model` and `notes`.
This is needed once, for a table without those columns; the packaged runs have them. To convert a file:
`python -m phalanx.plan.lab.prose OLD.csv NEW.csv`."""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phalanx.plan.known_models import known_model
from phalanx.plan.lab.runs import COLUMNS, FACTS

CHIPS = (  # pattern of a chip's name in a table -> hardware in the catalogue; the first match wins
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
PRECISIONS = (
    ("nvfp4", "fp4"), ("mxfp8", "mx"), ("fp8", "fp8|float8|f8"), ("fp32", "^(fp32|float32|tf32)$"),
    ("bf16", "^$|16|half|mixed|amp"),
)  # fmt: skip
SOFTWARE = (
    ("megascale", r"\[megascale\]"),
    ("maxtext", r"maxtext|paxml|\bjax\b"),
    ("llm-foundry", r"llm-foundry|mosaic|composer"),
    ("torchtitan", r"torchtitan"),
    ("deepspeed", r"deepspeed"),
    ("deepseek", r"2412\.19437|2505\.09343|dualpipe"),
    ("megatron-2022", r"sc21|2104\.04473|2205\.05198|bloom|mt-nlg"),
    ("megatron-2023", r"megascale"),
    ("nemo", r"nemo|dgxc|megatron-bridge"),
    ("megatron", r"megatron|llama 3 herd"),
)
YES_NO = {True: "yes", False: "no"}


def chip_of(gpu: str) -> str:
    plain = re.sub(r"[^a-z0-9]+", " ", gpu.lower()).strip()
    return next((chip for pattern, chip in CHIPS if re.search(pattern, plain)), gpu)


def precision_of(text: str) -> str | None:
    return next((name for name, pattern in PRECISIONS if re.search(pattern, text.lower())), None)


def facts(row: dict[str, str]) -> dict[str, str]:
    """Return the fact columns that the row's prose states; the others are empty."""
    notes, about = row["notes"], f"{row['source']} {row['model']}"
    found = dict.fromkeys(FACTS, "")
    software = _software(row)
    release = re.search(r"\[(\d\d\.\d\d(?:\.\d\d)?) NeMo", row["source"])
    found |= {"software": software, "release": release[1] if release else "", "flops": _convention(notes)}
    found |= _experts(notes) | _machine(row, notes) | _memory(notes)
    if re.search(r"w/o mtp", f"{row['model']} {notes}", re.I):
        found["mtp"] = "0"
    if stated := re.search(r"ETP ?= ?(\d+)", notes):
        found["etp"] = stated[1]
    if group := re.search(r"FSDP=(\d+)|ici_fsdp=(\d+)", notes):
        found["shard"] = group[1] or group[2]
    elif slices := re.search(r"(\d+) (?:x v\w+-\d+ )?slice", notes):
        found["shard"] = f"1/{slices[1]}"
    if re.search(r"no sequence parallel", notes, re.I):
        found["sequence_parallel"] = "no"
    if re.search(r"\beager\b", notes, re.I):
        found["compiled"] = "no"
    if re.search(r"vanilla tp|2D vanilla", notes, re.I):
        found["overlaps_tp"] = "no"
    elif re.search(r"async ?tp", notes, re.I):
        found["overlaps_tp"] = "yes"
    if re.search("lora", notes + about, re.I):
        found["trained"] = "0.02"
    if re.search(r"offload of activations", notes, re.I):
        found["offload"] = "yes"
    if stated := re.search(r"schedule (\S+)|\b(dualpipe|zbv)\b", notes, re.I):
        name = (stated[1] or stated[2]).lower().strip(";,")
        found["schedule"] = name if name in ("dualpipe", "zbv", "gpipe") else ""
    if software == "nemo":
        found |= _recipe(row, found["release"])
    return found


def _software(row: dict[str, str]) -> str:
    """Return the software that the row or its notes name; else the usual one for such a layout on such a chip."""
    for about in (f"{row['source']} {row['model']}", row["notes"]):
        for name, pattern in SOFTWARE:
            if re.search(pattern, about, re.I):
                # The ZeRO-3 baseline of Megatron's papers is other software.
                return "zero3-2021" if name == "megatron-2022" and row["zero_stage"] == "3" else name
    if chip_of(row["gpu"]).startswith("tpu"):
        return "maxtext"
    return "torchtitan" if row["zero_stage"] == "3" and row["pp"] in ("", "1") else "megatron"


def _convention(notes: str) -> str:
    """Return the stated convention; else full attention (Megatron-LM until 2024, PaLM, torchtitan, MaxText)."""
    if re.search(r"hardware[ -]flop", notes, re.I):
        return "hardware"
    if re.search(r"\b6N\b", notes):
        return "6N"
    return "causal" if re.search(r"(?<!non-)(?<!non)causal", notes, re.I) else "full"


def _experts(notes: str) -> dict[str, str]:
    """Parse text like "MoE 256 routed+1 shared top-8; moe_ffn=2048; first 3 layers dense"."""
    found = re.search(r"MoE (\d+)(?: routed)?(?:\+(\d+) shared)?(?: experts)? top-(\d+)", notes)
    if not found:
        return {}
    out = {"experts": found[1], "top_k": found[3], "shared_experts": found[2] or ""}
    if width := re.search(r"(?<!=)\bmoe_ffn ?= ?(\d+)", notes):
        out["expert_ffn"] = width[1]
    if dense := re.search(r"first (\d+) layers? dense", notes):
        out["dense_layers"] = dense[1]
    return out


def _machine(row: dict[str, str], notes: str) -> dict[str, str]:
    out = {}
    if size := re.search(r"(\d+)\s?GB", row["gpu"]):
        out["memory_gb"] = size[1]
    rate = re.search(r"([\d.]+)\s?TB/s HBM", notes)
    if rate and "H200" not in row["gpu"]:
        out["memory_tb_per_s"] = rate[1]
    if cards := re.search(r"(\d+)x(\d+)Gb/s per node", notes):
        out["nic_gbit"] = f"{int(cards[1]) * int(cards[2]) / 8:g}"
    if re.search(r"1:7 oversubscription", notes):
        out["fabric"] = "llama-3"
    if stated := re.search(r"peaks (\d+)/(\d+)", notes):
        out["peak_tflops"] = stated[1 if precision_of(row["precision"]) == "bf16" else 2]
    elif "bf16 peak" in notes:
        out["peak_tflops"] = "bf16"
    return out


def _memory(notes: str) -> dict[str, str]:
    out = {"out_of_memory": "yes"} if re.search(r"\bOOM\b|out of memory|ran out of", notes, re.I) else {}
    if found := re.search(r"peak mem(?:ory)? ([\d.]+) ?(GiB|GB)", notes, re.I):
        out["peak_gb"] = f"{float(found[1]) * (2**30 / 1e9 if found[2] == 'GiB' else 1.0):.2f}"
    return out


@cache
def _recipes() -> list[dict[str, Any]]:
    return tomllib.loads(resources.files("phalanx.plan.lab").joinpath("recipes.toml").read_text())["recipe"]


def _recipe(row: dict[str, str], release: str) -> dict[str, str]:
    """Return what NVIDIA's recipe for this model, chip, precision and release switches on (recipes.toml)."""
    known = known_model(row["model"])
    routed = bool(known.get("experts")) or "MoE" in row["notes"]
    chip, precision = chip_of(row["gpu"]), precision_of(row["precision"])
    for recipe in _recipes() if release else []:
        wanted = (("models", known.get("name")), ("chips", chip), ("precisions", precision))
        if any(key in recipe and value not in recipe[key] for key, value in wanted):
            continue
        if not recipe.get("since", "0") <= release < recipe.get("until", "9"):
            continue
        if recipe.get("experts", routed) != routed or (routed and "models" not in recipe and "experts" not in recipe):
            continue
        told = {key: recipe[key] for key in ("graphs", "dispatcher", "overlaps_ep", "fused_experts") if key in recipe}
        return {key: YES_NO[value] if isinstance(value, bool) else value for key, value in told.items()}
    return {}


def convert(old: Path, new: Path) -> None:
    with old.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    with new.open("w", newline="", encoding="utf-8") as file:
        names = [name for name in COLUMNS if name != "notes"]
        writer = csv.DictWriter(file, [*names, *FACTS, "notes"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            text = {name: (row.get(name) or "").strip() for name in COLUMNS}
            writer.writerow({**facts(text), **{k: v for k, v in row.items() if k in FACTS and v}, **text})


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
