"""Peak memory and step time with each way to save memory: one rank, each way in its own fresh process, a step of each
in turns.

Bar: each remedy that can save on this device saves at least 70 % of what arithmetic says (printed under the table), and
those that promise the same bits give the same weights and moments. On a CPU the host is the device, so that offloading
to it can save nothing there: those rows are shown, not judged."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from phalanx.core.job import Job
from phalanx.core.shape import ModelConfig
from phalanx.train.moments import BUFFERS
from phalanx.train.optimizer import PARCEL_NUMEL
from tests.cases import make_job

BAR = 0.7
WARM_UP, ROUNDS = 2, 1 if SMOKE else 3
ON_CPU = os.environ.get("PHALANX_TEST_DEVICE", "cpu") == "cpu"
CPU_MODEL = ModelConfig(vocab_size=257, dim=768, num_layers=8, num_heads=12, num_kv_heads=12, ffn_dim=2048)
GPU_MODEL = ModelConfig(vocab_size=257, dim=1024, num_layers=8, num_heads=16, num_kv_heads=16, ffn_dim=2816)
MODEL = CPU_MODEL if ON_CPU else GPU_MODEL
TRAIN = (
    dict(precision="fp32", seq_len=384, micro_batch=2, global_batch=2)
    if ON_CPU
    else dict(precision="bf16", seq_len=2048, micro_batch=4, global_batch=4)
)
TRAIN |= dict(steps=100, document_mask=False)
if SMOKE:
    MODEL = dataclasses.replace(CPU_MODEL, dim=48, num_layers=2, ffn_dim=64)
    TRAIN["seq_len"] = 16

# name: fields of [train], fields of [optimizer]
REMEDIES: dict[str, tuple[dict, dict]] = {
    "baseline": ({}, {}),
    "full recompute": (dict(recompute="full"), {}),
    "selective recompute": (dict(recompute="selective"), {}),
    "activation offload": (dict(offload_activations=True), {}),
    "bf16 states": ({}, dict(state="bf16")),
    "optimizer offload cpu": ({}, dict(offload="cpu")),
    "optimizer offload nvme": ({}, dict(offload="nvme")),
    "everything together": (
        dict(recompute="full", offload_activations=True),
        dict(state="bf16", offload="nvme"),
    ),
}
if SMOKE:  # one process with all of them, since every process costs seconds
    REMEDIES = {name: REMEDIES[name] for name in ("baseline", "everything together")}
CANNOT_SAVE_ON_CPU = {"activation offload", "optimizer offload cpu"}


def job_of(name: str) -> Job:
    train, optimizer = REMEDIES[name]
    job = make_job(model=MODEL, **(TRAIN | train))
    return dataclasses.replace(job, optimizer=dataclasses.replace(job.optimizer, **optimizer))


class Child:
    """A fresh process with one rank, which takes a step on request."""

    def __init__(self, name: str):
        command = [
            sys.executable,
            str(Path(__file__).with_name("offload_cases.py")),
            json.dumps(job_of(name).to_dict()),
        ]
        # Return freed blocks to the kernel, so that the peak shows memory in use.
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []

    def tell(self, word: str):
        print(word, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process of a remedy ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def expected_peak(job: Job, activations: int, parameters: int) -> float:
    """Return the bytes on the device: weights, moments, and the larger of the two ends of the backward pass. At its
    start all kept activations exist; at its end all gradients and the activations of one unit."""
    train, optimizer, c = job.train, job.optimizer, job.model
    working, tokens = activations / c.num_layers, train.micro_batch * train.seq_len  # working: one unit's
    element = 2 if train.precision == "bf16" else 4
    away = train.offload_activations and not ON_CPU
    if train.recompute == "none":
        working *= 2 if away else 1
        kept = working if away else float(activations)
    else:
        inputs = 0 if away else tokens * c.num_layers * c.dim
        products = tokens * c.num_layers * (6 * c.dim + 2 * c.ffn_dim)  # outputs of 7 matrices and of attention
        kept = working + element * (inputs + (products if train.recompute == "selective" else 0))
    moments = 2 * (2 if optimizer.state == "bf16" else 4)
    here = optimizer.offload == "none" or (optimizer.offload == "cpu" and ON_CPU)
    numel = parameters if here else min(parameters, BUFFERS * PARCEL_NUMEL)
    return 4 * parameters + moments * numel + max(kept, 4 * parameters + working)


def _ratio(child: Child, base: Child, kind: str) -> float:
    return statistics.median(a / b for a, b in zip(getattr(child, kind), getattr(base, kind), strict=True))


def main():
    options(__doc__).parse_args()
    children = {name: Child(name) for name in REMEDIES}
    facts = {name: child.answer() for name, child in children.items()}["baseline"]
    names = list(children)
    for round_ in range(WARM_UP + ROUNDS):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            step = children[name].tell("step")
            if round_ >= WARM_UP:
                children[name].seconds.append(step["seconds"])
                children[name].cpu_s.append(step["cpu_s"])
    ends = {name: child.tell("finish") for name, child in children.items()}
    for child in children.values():
        child.end()

    base, parameters = ends["baseline"], facts["parameters"]
    activations = base["activations"]
    print(
        f"{parameters / 1e6:.1f}M parameters, {TRAIN['micro_batch']} x {TRAIN['seq_len']} tokens, {TRAIN['precision']}"
    )
    print(f"on {facts['device']}; {machine()}")
    print(f"peak: {base['method']}; {ROUNDS} interleaved rounds\n")
    head = (
        f"{'':24}{'peak MB':>9}{'saved':>8}{'should':>8}{'share':>7}{'step ms':>9}{'ratio':>7}{'CPU-s':>7}{'ratio':>7}"
    )
    print(head + f"{'moments MB on device/host/file':>33}  same bits")
    ok, figures = True, {}
    for name, end in ends.items():
        saved = (base["peak_bytes"] - end["peak_bytes"]) / 1e6
        should = expected_peak(job_of("baseline"), activations, parameters)
        should = (should - expected_peak(job_of(name), activations, parameters)) / 1e6
        cannot = ON_CPU and name in CANNOT_SAVE_ON_CPU
        judged = name != "baseline" and not cannot
        wall, cpu = (_ratio(children[name], children["baseline"], kind) for kind in ("seconds", "cpu_s"))
        same = end["digest"] == base["digest"]
        exact = job_of(name).optimizer.state == "full"
        good = (same or not exact) and (not judged or saved >= BAR * should)
        ok &= good
        share = f"{saved / should:7.2f}" if judged else f"{'no' if cannot else '':>7}"
        held = "/".join(f"{end['held'][place] / 1e6:.0f}" for place in ("device", "host", "file"))
        print(
            f"{name:24}{end['peak_bytes'] / 1e6:9.0f}{saved:8.0f}{should:8.0f}{share}"
            f"{statistics.median(children[name].seconds) * 1e3:9.0f}{wall:7.2f}"
            f"{statistics.median(children[name].cpu_s):7.1f}{cpu:7.2f}{held:>33}"
            f"  {'yes' if same else 'no, as said' if not exact else 'NO'}{'' if good else '  BELOW THE BAR'}"
        )
        figures[name] = {
            "peak_mb": round(end["peak_bytes"] / 1e6),
            "saved_mb": round(saved),
            "should_mb": round(should),
            "step_ratio": round(wall, 2),
            "cpu_ratio": round(cpu, 2),
        }
    for name, end in ends.items():
        if not (t := end["traffic"]):
            continue
        print(
            f"\n{name}: read {t['read_gbps']:.2f} GB/s, written {t['written_gbps']:.2f} GB/s "
            f"({'direct I/O' if t['direct'] else 'through the page cache'}), "
            f"{t['read_bytes'] / 1e6 / t['steps']:.0f} MB each way per step",
            end="",
        )
        figures[name] |= {k: round(t[k], 2) for k in ("read_gbps", "written_gbps")}
    print(
        f"\n\nshould: weights 4 B and gradients 4 B per parameter; moments 8 B, bf16 4 B, elsewhere {BUFFERS} parcels"
        f"\nof {PARCEL_NUMEL:,}; activations {activations / 1e6:.0f} MB, as autograd saves them, of which full "
        f"recomputation keeps\neach unit's input, selective also the results of products, both one unit more.\n"
        f"Peak = weights + moments + the larger of kept activations (backward begins) and gradients + one unit (ends)."
    )
    finish("offload", ok, remedies=figures)


if __name__ == "__main__":
    main()
