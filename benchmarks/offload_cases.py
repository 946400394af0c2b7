"""One rank of benchmarks/offload.py: it takes a step for each line "step" on standard input, and reports its usage
after "finish". It measures on the device, or on a CPU the resident memory of this process."""

from common import machine  # isort: skip  (first: it makes tests/ importable)

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.core.job import Job
from phalanx.parallel import offload
from phalanx.parallel.device import Device
from phalanx.train import state
from phalanx.train.moments import File
from tests.cases import Rank

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Peak:
    """The peak of memory in use since `reset`, relative to the memory in use when this object was made."""

    def __init__(self, device):
        self.device, self.method = device, "torch.accelerator.max_memory_allocated"
        if device.is_cpu:
            self.method = "growth of resident memory (VmHWM, reset after the warm-up) over the process with all imports"
            self.before = _status_bytes("VmRSS")

    def reset(self):
        if not self.device.is_cpu:
            torch.accelerator.reset_peak_memory_stats()
            return
        try:
            CLEAR.write_text("5")
        except OSError:
            self.method = self.method.replace("reset after the warm-up", "which could not be reset")

    def read(self) -> int:
        if not self.device.is_cpu:
            return torch.accelerator.max_memory_allocated()
        return _status_bytes("VmHWM") - self.before


def saved_activations(rank) -> int:
    """Return the bytes that autograd keeps of the units' forward pass: all that the offload would take, even small
    ones."""
    sizes, host_bytes = [], Device.host_bytes

    def counted(device, size):
        sizes.append(size)
        return host_bytes(device, size)

    offload.THRESHOLD_BYTES, Device.host_bytes = 0, counted
    offload.apply_offload(list(rank.engine.model.layers.values()), rank.device)
    rank.engine.gradients(rank.batches(0))
    return sum(sizes)


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output must not mix with the answers

    def answer(**body):
        print(json.dumps(body), file=answers)

    job = Job.from_dict(json.loads(sys.argv[1]))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    state.DIGEST_LIMIT_BYTES = 1 << 40
    device = Device.pick(job.run.device, 0, 64, share=True)  # must come first: it chooses kernels before one has run
    peak = Peak(device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Rank(job, 0, store, 1)
    parameters = sum(p.numel() for p in rank.state.params.values())
    answer(parameters=parameters, device=device.describe(), machine=machine())
    steps = 0
    for line in sys.stdin:
        if line.strip() == "finish":
            break
        if steps == 2:  # the moments and all buffers exist by now
            peak.reset()
        batches = rank.batches(steps)
        device.synchronize()
        start, cpu = time.perf_counter(), _cpu_s()
        rank.engine.step(batches)
        device.synchronize()
        answer(seconds=time.perf_counter() - start, cpu_s=_cpu_s() - cpu)
        steps += 1
    peak_bytes = peak.read()
    optimizer, traffic = rank.state.optimizer, None
    held = optimizer.held_bytes()
    with contextlib.suppress(AttributeError):
        file = optimizer.stream.store
        if isinstance(file, File):
            traffic = {
                "read_gbps": file.read.size_bytes / file.read.seconds / 1e9,
                "written_gbps": file.written.size_bytes / file.written.seconds / 1e9,
                "read_bytes": file.read.size_bytes,
                "direct": file.direct,
                "steps": steps,
            }
    digest = rank.state.digest()
    plain = job.train.recompute == "none" and not job.train.offload_activations
    activations = saved_activations(rank) if plain else 0
    answer(
        peak_bytes=peak_bytes,
        method=peak.method,
        held=held,
        digest=digest,
        traffic=traffic,
        activations=activations,
    )
    sys.stdin.read()
    rank.close()


if __name__ == "__main__":
    main()
