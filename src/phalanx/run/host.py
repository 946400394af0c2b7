"""Refuse what this host cannot do, with figures, before anything starts. `core.compat` refuses what no host can do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.core.image import MAX_CLASSES, SYNTHETIC_IMAGES
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.core.limits import limit_bytes
from phalanx.runtime.launch import Adapter
from phalanx.runtime.spawner import SLOTS

GIB = 2**30
LEAST_MEMLOCK = 1 << 30
CLOCK_S = 60.0  # tolerated difference between the clocks of two hosts
MOST_NODES = 32  # nodes simulated by one host; each has its own processes
# Device nodes of drivers: if one exists, the ranks may run outside host memory.
GPUS = Path("/proc/driver/nvidia/gpus")
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")


def refuse(job: Job) -> None:
    _classes(job)
    _devices(job)
    _ranks(job)
    _memory(job)


def refuse_hosts(job: Job, adapter: Adapter) -> None:
    """Refuse what several hosts cannot do."""
    _classes(job)
    layout, need = job.layout, num_nodes(job.layout)
    if layout.ranks_per_node == 0:
        remedy = "set it to the number of accelerators of a host"
        raise UserError("how many ranks does a host have?", field="layout.ranks_per_node", value=0, remedy=remedy)
    seats = adapter.seats(need + job.recovery.spares)
    if seats and len(seats) < need:
        raise UserError(
            f"the layout asks for {need} hosts of {layout.ranks_per_node} ranks",
            field="hosts",
            value=", ".join(seat.name for seat in seats),
            remedy="name more hosts (those beyond the layout's need are spares), or lower layout.replica",
        )
    if job.checkpoint.every_steps >= 0 and not job.checkpoint.dir:
        raise UserError(
            "every host would write its part of a checkpoint to its own disk",
            field="checkpoint.dir",
            value="",
            remedy="name a bucket, s3://..., or a folder that all hosts share",
        )


def warnings(node: dict[str, Any]) -> Iterator[str]:
    """Warn about a node that has joined with unsuitable settings."""
    if node["devices"] and 0 <= node["memlock_bytes"] < LEAST_MEMLOCK:
        yield (
            f"node {node['node']} may lock only {node['memlock_bytes'] / 2**20:.0f} MiB of memory, and RDMA and pinned "
            "buffers need more: raise it there, as by `ulimit -l unlimited` or LimitMEMLOCK=infinity of sshd's unit"
        )
    off_s = node["clock_s"] - time.time()
    if abs(off_s) > CLOCK_S:
        yield (
            f"the clock of node {node['node']} is {abs(off_s):,.0f} s {'ahead of' if off_s > 0 else 'behind'} this "
            "host's: no decision compares them, but S3 refuses requests that are 15 minutes off: set it, as by chrony"
        )


def _classes(job: Job) -> None:
    if job.data.source == SYNTHETIC_IMAGES and job.model.vocab_size > MAX_CLASSES:
        raise UserError(
            f"{SYNTHETIC_IMAGES} have at most {MAX_CLASSES} classes",
            field="model.vocab_size",
            value=job.model.vocab_size,
            remedy=f"set model.vocab_size to the number of classes, {MAX_CLASSES} at most",
        )


def _devices(job: Job) -> None:
    """Check the devices as far as possible without torch, so that nothing is built for ranks that cannot start."""
    if job.run.device == "cuda" and not any(Path(node).exists() for node in ACCELERATORS):
        raise UserError(
            "this host has no such device, or its driver is not loaded",
            field="run.device",
            value=job.run.device,
            remedy='set run.device = "auto" or "cpu"; in a container, let it see the devices',
        )
    found = len(list(GPUS.glob("*"))) if job.run.device in ("auto", "cuda") else 0
    if 0 < found < job.layout.world_size and not job.run.share_devices:
        raise UserError(
            f"{job.layout.world_size} ranks would share {found} devices",
            field="run.share_devices",
            value=False,
            remedy="lower the degrees in [layout], or set run.share_devices = true, which is slow",
        )


def _ranks(job: Job) -> None:
    most = SLOTS - 3  # the other slots are for the store, the data service and the keeper
    if job.layout.world_size > most:
        raise UserError(
            f"one host runs at most {most} ranks",
            field="layout",
            value=job.layout.describe(),
            remedy="lower the degrees in [layout]",
        )
    nodes = num_nodes(job.layout) + job.recovery.spares
    if nodes > MOST_NODES:
        raise UserError(
            f"the layout and recovery.spares ask for {nodes} nodes, and one host plays at most {MOST_NODES}",
            field="layout.ranks_per_node",
            value=job.layout.ranks_per_node,
            remedy="raise layout.ranks_per_node, or lower layout.replica or recovery.spares",
        )
    if job.recovery.min_replicas > job.layout.replica:
        raise UserError(
            f"the layout has {job.layout.replica}",
            field="recovery.min_replicas",
            value=job.recovery.min_replicas,
            remedy="lower it, or raise layout.replica",
        )


def _memory(job: Job) -> None:
    """Check memory for weights, gradients and two moments per parameter, once per replica; moments in a file do not
    count. User-defined families are not checked here: their ranks fail with torch's own figures."""
    if job.model.family not in ("dense", "moe") or job.run.device not in ("cpu", "auto"):
        return
    if job.run.device == "auto" and any(Path(node).exists() for node in ACCELERATORS):
        return
    master = 8 if job.train.precision == "fp64" else 4
    moment = {"nvme": 0}.get(job.optimizer.offload, 2 if job.optimizer.state == "bf16" else master)
    bytes_per_param = 2 * (master + moment)
    need, have = job.model.num_params * bytes_per_param * job.layout.replica, limit_bytes()
    if need > have:
        raise UserError(
            f"weights, gradients and optimizer state of {job.model.num_params / 1e9:.1f} billion parameters, "
            f"{bytes_per_param} bytes each, in {job.layout.replica} replica(s) need {need / GIB:,.1f} GiB; "
            f"this host has {have / GIB:,.1f} GiB",
            field="model",
            value=f"{job.model.num_layers} layers of width {job.model.dim}",
            remedy="choose a smaller model.preset, or run on accelerators",
        )
