"""The one module that knows the device: which one, its process-group backend, streams, memory and peak speed. Other
modules say `device`, never the name of a vendor."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.errors import UserError
from phalanx.core.limits import num_cores

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Dense bf16 tensor-core peaks from vendors' data sheets, in FLOP/s. Other devices are measured.
DATASHEET_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "MI300X": 1307e12}

Moment: TypeAlias = float | torch.Event  # on a CPU by the host's clock, in seconds


@dataclass(frozen=True)
class Device:
    torch: torch.device
    backend: str  # of torch.distributed
    share: float = 1.0  # fraction of the device that this rank has, if ranks outnumber devices or cores

    @staticmethod
    def pick(wanted: str, rank: int, ranks: int, share: bool = False) -> Device:
        """Choose the device of one of the `ranks` of this host. `auto` takes the accelerator if there is one. Ranks
        that `share` a device speak Gloo, because NCCL refuses two ranks on one GPU."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if wanted == "auto":
            wanted = accelerator.type if accelerator else "cpu"
        if wanted == "cpu":
            avoid_broken_amx()
            cores = num_cores()
            return Device(torch.device("cpu"), "gloo", min(1.0, cores / (torch.get_num_threads() * ranks)))
        if accelerator is None or accelerator.type != wanted:
            found = accelerator.type if accelerator else "none"
            raise UserError(
                f"no such device on this host (accelerator found: {found})",
                field="run.device",
                value=wanted,
                remedy='set run.device = "auto" or "cpu"',
            )
        count = torch.accelerator.device_count()
        if ranks > count and not share:
            raise UserError(
                f"{ranks} ranks would share {count} devices",
                field="run.share_devices",
                value=share,
                remedy="lower the degrees in [layout], or set run.share_devices = true, which is slow",
            )
        device = torch.device(wanted, rank % count)
        torch.accelerator.set_device_index(device.index)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
        backend = dist.get_default_backend_for_device(device) if ranks <= count else "gloo"
        return Device(device, backend, min(1.0, count / ranks))

    @property
    def of_groups(self) -> torch.device | None:
        """Return the device to which a new group is bound, so that its communicator exists at once and no rank creates
        it in another order. None: the library has no such option."""
        return None if self.backend == "gloo" else self.torch

    @property
    def is_cpu(self) -> bool:
        return self.torch.type == "cpu"

    def seed(self, value: int) -> None:
        """Seed the generators of this device and of the host. (torch.manual_seed looks for every kind of device first,
        which takes longer than a small layer.)"""
        torch.default_generator.manual_seed(value)
        if not self.is_cpu:
            torch.get_device_module(self.torch).manual_seed(value)

    def choose_kernels(self, deterministic: bool) -> None:
        """Choose the kernels of this process. Some (attention's backward) have a faster version that does not give the
        same bits twice; cuDNN's attention is one, and the fastest there is."""
        if self.is_cpu:
            return
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False
        _attention.close()
        _attention.enter_context(sdpa_kernel(ATTENTION, set_priority=True))

    @property
    def has_cudnn(self) -> bool:
        return self.torch.type == "cuda" and torch.version.hip is None and torch.backends.cudnn.is_available()

    @property
    def has_fp8(self) -> bool:
        """Return whether the device multiplies e4m3 and e5m2 in the OCP formats. A CPU does it by way of fp32."""
        return self.is_cpu or (torch.version.hip is None and torch.cuda.get_device_capability(self.torch) >= (8, 9))

    @property
    def has_grouped_fp8(self) -> bool:
        """Return whether to use grouped products with scales by row: torch's kernel is made for Hopper."""
        return self.is_cpu or (torch.version.hip is None and torch.cuda.get_device_capability(self.torch)[0] == 9)

    def synchronize(self) -> None:
        if not self.is_cpu:
            torch.accelerator.synchronize(self.torch)

    def peak_memory_bytes(self) -> int:
        """Return the most memory that the allocator has held; without an accelerator, that this process has held."""
        if self.is_cpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(torch.accelerator.max_memory_reserved(self.torch))

    def new_stream(self) -> torch.Stream | None:
        return None if self.is_cpu else torch.Stream(self.torch)

    def on(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Run what follows on `stream`; `wait` sets what it must wait for."""
        if stream is None:
            return contextlib.nullcontext()
        return stream

    def mark(self) -> torch.Event | None:
        if self.is_cpu:
            return None
        return torch.accelerator.current_stream(self.torch).record_event()

    def moment(self) -> Moment:
        """Mark the point that the device's work has reached, for `seconds_between`, without waiting for it."""
        if self.is_cpu:
            return time.perf_counter()
        event = torch.Event(self.torch, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.torch))
        return event

    @staticmethod
    def seconds_between(begin: Moment, end: Moment) -> float:
        """Wait until the device has reached `end`, and measure from `begin`."""
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float) and isinstance(end, float)
            return end - begin
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self, stream: torch.Stream | None, event: torch.Event | None) -> None:
        if event is not None:
            (stream or torch.accelerator.current_stream(self.torch)).wait_event(event)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the device without waiting."""
        return tensor if self.is_cpu else tensor.pin_memory().to(self.torch, non_blocking=True)

    def host_bytes(self, size: int) -> torch.Tensor:
        """Allocate host memory at a page boundary; on an accelerator it is pinned, so that nobody waits for a copy."""
        if self.is_cpu:
            return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def use(self) -> None:
        """Select this device in a thread that has not used it yet."""
        if not self.is_cpu:
            torch.accelerator.set_device_index(self.torch.index)

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """Pin existing memory, such as memory shared with another process, and return it."""
        if not self.is_cpu:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))  # or HIP's
        return host

    def unpin(self, host: torch.Tensor) -> None:
        """Unpin memory before it is unmapped; the device would take what is mapped there later for pinned."""
        if not self.is_cpu:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(host.data_ptr()))

    def hold(self, tensor: torch.Tensor, stream: torch.Stream | None = None) -> None:
        """Keep the memory of `tensor` from being reused before `stream` (default: the current one) has read it, even if
        the caller drops it now. Needed when the tensor was made on another stream."""
        if not self.is_cpu:
            tensor.record_stream(stream or torch.accelerator.current_stream(self.torch))

    def describe(self) -> str:
        if self.is_cpu:
            return f"cpu, threads per rank: {torch.get_num_threads()}"
        return torch.get_device_module(self.torch).get_device_name(self.torch)

    def peak_flops(self, dtype: torch.dtype) -> tuple[float, str]:
        """Return the peak FLOP/s of this rank's device for the MFU, and where the figure comes from."""
        if dtype == torch.bfloat16:
            for name, peak in DATASHEET_BF16.items():
                if name in self.describe():
                    return peak * self.share, f"{name} data sheet, dense bf16"
        size = 512 if self.is_cpu else 4096
        a = torch.ones(size, size, dtype=dtype, device=self.torch)
        torch.mm(a, a)
        best = float("inf")
        for _ in range(5):
            self.synchronize()
            start = time.perf_counter()
            torch.mm(a, a)
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return self.share * 2 * size**3 / best, f"measured {size}x{size} matmul in {str(dtype).removeprefix('torch.')}"

    def standalone_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Form a process group that torch's registry does not know: dropping the last reference closes it, and peers
        that wait in it get an error."""
        if self.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._threads = 1
            interface = os.environ.get("GLOO_SOCKET_IFNAME")  # torch's own groups honour it
            options._devices = [
                dist.ProcessGroupGloo.create_device(interface=interface)
                if interface
                else dist.ProcessGroupGloo.create_default_device()
            ]
            return dist.ProcessGroupGloo(store, rank, size, options)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(self.torch)
        return group


def abort_all(groups: list[Any]) -> None:
    """Abort communicators together: one by one they could wait for each other. Groups without any are left alone."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return
    found = []
    for group in groups:
        backend = group
        with contextlib.suppress(RuntimeError, AttributeError):
            backend = group._get_backend(torch.device("cuda"))
        if isinstance(backend, nccl):
            found.append(backend)
    if found:
        found[0]._group_start()
        for backend in found:
            backend.abort()
        found[0]._group_end()


_attention = contextlib.ExitStack()  # torch sets its preference among attention kernels by a context


@cache
def avoid_broken_amx() -> None:
    """Keep oneDNN from AMX where it is broken. Some virtual machines advertise Intel's AMX and then refuse its
    instructions, which kills the process at its first bf16 matmul. A child process tries it first."""
    cpuinfo = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpuinfo.exists() or "amx_bf16" not in cpuinfo.read_text():
        return
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGILL, signal.SIG_DFL)  # no stack dump: dying is an answer
            torch.set_num_threads(1)
            a = torch.ones(64, 64, dtype=torch.bfloat16)
            torch.nn.functional.linear(a, a)
        os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
