"""Turns the options of `phalanx plan` into a question for the planner: looks up names, checks numbers, and fills in and
notes what was left out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from phalanx.core.errors import UserError
from phalanx.core.layout import CHUNKS
from phalanx.core.shape import ModelConfig
from phalanx.hardware import Cluster, load
from phalanx.plan.cost.calibrated import known_profile, profile_from
from phalanx.plan.cost.candidates import PRECISIONS, SCHEDULES
from phalanx.plan.cost.feedback import learned
from phalanx.plan.cost.machine import PEAKS, Machine
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import OWN
from phalanx.plan.cost.software import names as engines
from phalanx.plan.known_models import published, published_shape
from phalanx.plan.planner import Request, usual_batch, usual_tokens
from phalanx.plan.report.answer import Answer, answer
from phalanx.plan.search.impossible import parse_pins
from phalanx.plan.search.objective import OBJECTIVES
from phalanx.plan.search.runnable import RUN_PRECISIONS
from phalanx.plan.search.space import COMPILED, Ask, Limits
from phalanx.run.planned import feedback

SEQ = 8192
RUNS_ON = ("NVIDIA", "AMD")  # vendors of chips that torch has a backend for in this engine (parallel/device.py)
SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    gpus: int
    hardware: str
    tokens: str = ""
    global_batch: int | None = None
    seq: int | None = None
    objective: str = "time"
    days: float | None = None
    pin: str = ""
    compare: tuple[str, ...] = ()
    precision: str = "bf16"
    schedules: str = ""
    margin: float = 0.0
    use: float = 0.95
    wide_tp: bool = False
    software: str = OWN
    fabric: str = ""
    site: str = ""
    failures: float | None = None
    hardware_file: Path | None = None
    calibration: Path | None = None


class Model(NamedTuple):
    name: str
    shape: ModelShape
    batch: int = 0  # 0: not given
    steps: int = 0
    assumed: tuple[str, ...] = ()  # where a job file differs


def ask(options: Options) -> Answer:
    _check(options)
    catalogue = load(options.hardware_file)
    cluster = catalogue.cluster(options.hardware, options.gpus, options.fabric or None, options.site or None)
    return answer(request(options, cluster), catalogue, options.compare)


def request(options: Options, cluster: Cluster) -> Request:
    model = find_model(options.model, options.seq or 0)
    shape, assumed = model.shape, list(model.assumed)
    batch = options.global_batch or model.batch
    pins = parse_pins(options.pin, "pin")
    if "precision" in pins:
        _precisions(str(pins["precision"]), cluster)
    schedules = _names(options.schedules, "schedules", SCHEDULES) if options.schedules else COMPILED
    precisions = _precisions(options.precision, cluster)
    if options.software == OWN:
        schedules = _run("schedules", schedules, CHUNKS, options.schedules == "all")
        precisions = _run("precision", precisions, RUN_PRECISIONS, options.precision == "all")
        for axis, known in (("schedule", CHUNKS), ("precision", RUN_PRECISIONS)):
            _run(f"pin {axis}", [str(pins[axis])] if axis in pins else [], known)
    limits = Limits(
        margin=options.margin,
        use=options.use,
        tolerance=0.0 if batch else Limits().tolerance,
        tp_domain=not options.wide_tp,
        schedules=schedules,
        precisions=precisions,
        engine=options.software == OWN,
        pins=pins,
    )
    if not batch:
        batch = usual_batch(cluster.num_chips, int(shape.seq))
        assumed.append(f"a batch of {batch:,} sequences (--global-batch)")
    tokens = parse_count(options.tokens) if options.tokens else model.steps * batch * float(shape.seq)
    if not tokens:
        tokens = usual_tokens(shape)
        assumed.append(f"{tokens / 1e12:.3g} T tokens, 20 for each active parameter (--tokens)")
    assumed += _model_only(options, cluster)
    profile = _profile(options, cluster)
    asked = Ask(shape, cluster, profile, batch, limits, options.software == OWN, options.failures or 0.0)
    return Request(model.name, asked, tokens, options.objective, options.days or math.inf, tuple(assumed))


def _model_only(options: Options, cluster: Cluster) -> list[str]:
    """List what this engine cannot run; those figures come from the cost model alone."""
    from phalanx.spec import PRESETS

    if options.software != OWN:
        return []
    chip, name = cluster.node.chip, options.model.lower()
    out = [f"model only: this engine does not run on {chip.name}"] if chip.vendor not in RUNS_ON else []
    if not name.endswith(".toml") and not Path(options.model).is_file() and name not in PRESETS:
        out.append(f"model only: this engine has no {name}")
    return out


def _profile(options: Options, cluster: Cluster) -> Profile:
    """Return the calibrated profile, or what such software reached on such chips elsewhere; runs here correct it."""
    if options.calibration:
        profile = profile_from(options.calibration, Machine.of(cluster))
    else:
        profile = known_profile(cluster, options.software)
    return learned(profile, cluster.node.name, feedback()) if options.software == OWN else profile


def find_model(name: str, seq: int = 0) -> Model:
    """Find a job file, a preset of the engine, or a published model."""
    if name.endswith(".toml") or Path(name).is_file():
        return _of_job(Path(name), seq)
    from phalanx.spec import PRESETS

    said = name.lower()
    if said in PRESETS:
        known = {f.name for f in fields(ModelConfig)}
        config = ModelConfig(**{k: v for k, v in PRESETS[said].items() if k in known})
        if config.context and seq > config.context:
            remedy = f"take --seq {config.context} or less, or a job file whose model.context is larger"
            raise UserError(f"{said} is made for {config.context} tokens", field="seq", value=seq, remedy=remedy)
        return Model(said, ModelShape.from_config(config, seq or min(SEQ, config.context or SEQ)))
    if said in published():
        return Model(said, published_shape(said, seq or SEQ))
    names = [*PRESETS, *(n for n in published() if n not in PRESETS)]
    near = [n for n in names if said in n] or difflib.get_close_matches(said, names, n=4, cutoff=0.5)
    listing = f"did you mean {', '.join(near)}?" if near else f"there is {', '.join(names)};"
    remedy = f"{listing} a job file's own model goes by the path of the file"
    raise UserError("no such model", field="model", value=name, remedy=remedy)


def _of_job(path: Path, seq: int) -> Model:
    from phalanx.spec import load as load_job

    job = load_job(path).job
    if job.model.family not in ("dense", "moe"):
        remedy = "plan models of the dense or the moe family"
        raise UserError(
            "the planner does not know its sizes", field="model.family", value=job.model.family, remedy=remedy
        )
    length = seq or job.train.seq_len
    shape = ModelShape.from_config(job.model, length)
    assumed = ("the file's model, batch, sequence and steps, not its layout (--pin) and precision (--precision)",)
    return Model(job.name, shape, job.train.global_batch, job.train.steps, assumed)


def parse_count(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbgt]?)", text.strip().lower().replace(",", ""))
    if not found or not 0 < float(found[1]) * SIZES[found[2]] <= 1e18:
        raise UserError("that is no number of tokens", field="tokens", value=text, remedy="such as 15T, 300B or 1e12")
    return float(found[1]) * SIZES[found[2]]


def parse_sizes(text: str) -> list[int]:
    """Parse numbers of chips, such as 8,64,512."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        remedy = "write whole numbers with commas between them, such as 8,64,512"
        raise UserError("not a list of numbers of chips", field="sizes", value=text, remedy=remedy)
    return sorted({int(word) for word in words})


def _names(text: str, what: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = known if text == "all" else tuple(filter(None, (part.strip() for part in text.split(","))))
    unknown = [n for n in names if n not in known]
    if unknown or not names:
        raise UserError(f"no such {what}", field=what, value=text, remedy=f"some of {', '.join(known)}")
    return names


def _run(field: str, names: Iterable[str], known: Iterable[str], some: bool = False) -> tuple[str, ...]:
    """Return the names that this engine runs. Unless `some`, it is an error if it lacks any of them."""
    missing = [name for name in names if name not in known]
    if missing and not some:
        remedy = f"one of {', '.join(known)}; or --software, such as nemo, to plan for an engine that has it"
        raise UserError(f"this engine has no {missing[0]}", field=field, value=missing[0], remedy=remedy)
    return tuple(name for name in names if name in known)


def _precisions(text: str, cluster: Cluster) -> tuple[str, ...]:
    names, chip = _names(text, "precision", PRECISIONS), cluster.node.chip
    for name in names:
        # Only TPUs train in int8, because they lack fp8.
        able = [p for p in PEAKS[name] if p != "int8" or chip.name.startswith("tpu")]
        if name in ("nvfp4", "mxfp8"):  # block scales came with the chips that have fp4
            able = ["nvfp4"]
        if name != "fp32" and not any(p in chip.peak for p in able):
            remedy = f"{chip.name} computes in {', '.join(chip.peak)}"
            raise UserError("the chip has no such precision", field="precision", value=name, remedy=remedy)
    return names


def _check(o: Options) -> None:
    """Check that the numbers make sense, which typer cannot."""
    for field, value, what in (("model", o.model, "llama3-8b"), ("hardware", o.hardware, "h100")):
        if not value:
            raise UserError("it is missing", field=field, value=value, remedy=f"--{field}, such as {what}")
    if o.gpus < 1:
        raise UserError("at least one chip", field="gpus", value=o.gpus, remedy="--gpus, such as 64")
    numbers = {"global_batch": o.global_batch, "seq": o.seq, "days": o.days, "failures": o.failures}
    for field, number in numbers.items():
        if number is not None and not 1e-6 <= number <= 1e12:
            raise UserError(
                "not a sensible number", field=field, value=number, remedy="leave it out, or give one above 0"
            )
    for field, share in (("margin", o.margin), ("use", o.use)):
        if not 0 <= share < 1 and not (field == "use" and share == 1):
            raise UserError("that is no share", field=field, value=share, remedy="a number from 0 to 1, such as 0.05")
    if o.objective not in OBJECTIVES:
        ways = "; ".join(f"{name}: {what}" for name, what in OBJECTIVES.items())
        raise UserError("no such objective", field="objective", value=o.objective, remedy=ways)
    if o.software not in engines():
        remedy = f"one of {', '.join(engines())}"
        raise UserError("nothing is known of it", field="software", value=o.software, remedy=remedy)
