"""The process groups of one rank in one generation. A replica is its own torch world, with the mesh
inside it; across replicas there are only standalone groups, one set per coordinate."""

from __future__ import annotations

import _thread
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.core.job import CollectivesConfig
from phalanx.core.layout import Coord, Layout
from phalanx.parallel.algorithms import possible
from phalanx.parallel.cross import Cross
from phalanx.parallel.device import Device, abort_all
from phalanx.parallel.rendezvous import TIMEOUT, is_waiting_on
from phalanx.parallel.tiers import Form, Peers

_standalone_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # those that torch's registry does not know
NOT_SEEN = -(1 << 63)
BEGIN_S = 10.0  # within which a new thread must run
T = TypeVar("T")
DEFAULT = CollectivesConfig()


@dataclass
class Groups:
    mesh: DeviceMesh  # pp x shard x cp x tp
    state: DeviceMesh  # over which a stage's state is sharded: shard x cp
    experts: DeviceMesh | None  # the same ranks seen by the experts: edp x ep
    cross: Cross | None
    tiers: dict[str, Peers] = field(default_factory=dict)  # by the group over which state is sharded

    def axis(self, name: str) -> dist.ProcessGroup:
        return self.mesh.get_group(name)

    @property
    def shard(self) -> dist.ProcessGroup:
        return self.axis("shard")

    @property
    def tp(self) -> dist.ProcessGroup:
        return self.axis("tp")

    @staticmethod
    def form(
        store: dist.Store,
        world: int,
        layout: Layout,
        coord: Coord,
        device: Device,
        experts: bool = False,
        collectives: CollectivesConfig = DEFAULT,
    ) -> Groups:
        """Form the groups, a collective over the replica. `experts`: the model has some. `form_cross` forms `cross`."""
        try:
            return Groups._form(store, world, layout, coord, device, experts, collectives)
        except BaseException:
            # torch numbers groups, even those that it failed to form, and looks for its peers under that number.
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.distributed_c10d._world.group_count = 0
            raise

    @staticmethod
    def _form(
        store: dist.Store,
        world: int,
        layout: Layout,
        coord: Coord,
        device: Device,
        experts: bool,
        collectives: CollectivesConfig,
    ) -> Groups:
        dist.init_process_group(
            device.backend,
            store=dist.PrefixStore(f"w{world}/replica{coord.replica}", store),
            rank=layout.inside(coord),
            world_size=layout.replica_size,
            timeout=TIMEOUT,
            device_id=device.of_groups,
        )
        kind = device.torch.type
        sizes = (layout.pp, layout.shard, layout.cp, layout.tp)
        mesh = init_device_mesh(kind, sizes, mesh_dim_names=("pp", "shard", "cp", "tp"))
        state = mesh["shard"] if layout.cp == 1 else mesh["shard", "cp"]._flatten("state")
        view = None
        if experts:
            sizes_e = (layout.pp, layout.stage_size // layout.ep, layout.ep)
            view = init_device_mesh(kind, sizes_e, mesh_dim_names=("pp_e", "edp", "ep"))
        scope = dist.PrefixStore(f"w{world}/tiers{coord.replica}", store)
        tiers = form_tiers(scope, layout, coord, device, [state] + ([view["edp"]] if view else []), collectives)
        return Groups(mesh, state, view, None, tiers)

    def total(self, values: torch.Tensor, guard: Callable[[Callable[[], None]], bool]) -> list[int] | None:
        """Sum each of several integers over all ranks: inside the replica, then across. None: the replicas were cut off
        from each other. A rank that gets the sums knows that all have contributed, and tells the others of its replica.
        `guard` runs what may fail with other replicas, and returns whether it worked."""
        alone = dist.get_world_size() == 1
        if not alone:
            dist.all_reduce(values)
        if cross := self.cross:
            seen = values.clone()
            if not guard(lambda: cross.sum_(seen)):
                seen.fill_(NOT_SEEN)
            if not alone:
                dist.all_reduce(seen, dist.ReduceOp.MAX)
            values = seen
        found = [int(x) for x in values.tolist()]
        return None if NOT_SEEN in found else found

    def agree(self, values: torch.Tensor) -> list[int]:
        """Return the minimum of each value over the ranks of the replica."""
        if dist.get_world_size() > 1:
            dist.all_reduce(values, dist.ReduceOp.MIN)
        return [int(x) for x in values.tolist()]

    def close(self) -> None:
        """Drop every group. The engine that used them must be gone: it holds references, and a group's sockets close
        with the last one."""
        if self.cross:
            self.cross.close()
        for peers in self.tiers.values():
            peers.close()
        for mesh in (self.mesh, self.experts):
            # DTensor's caches keep the first mesh of a kind for ever. Without its groups that mesh holds no threads or
            # sockets, and it finds the groups of a later generation, which have the same names.
            getattr(mesh, "_pg_registry", {}).clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def form_cross(
    store: dist.Store,
    generation: int,
    layout: Layout,
    coord: Coord,
    device: Device,
    collectives: CollectivesConfig = DEFAULT,
    replicas: Sequence[int] | None = None,
) -> Cross | None:
    """Form the groups over the `replicas` (None: all) that hold this coordinate, in this order. None: it is alone."""
    replicas = range(layout.replica) if replicas is None else replicas
    if len(replicas) == 1:
        return None
    form = _standalone(dist.PrefixStore(f"g{generation}/cross{layout.inside(coord)}", store), device)
    nodes, me = layout.peers_by_node(coord, replicas), replicas.index(coord.replica)
    return Cross(Peers("replica", nodes, me, collectives, device.backend, form))


def form_tiers(
    store: dist.Store,
    layout: Layout,
    coord: Coord,
    device: Device,
    meshes: list[DeviceMesh],
    collectives: CollectivesConfig,
) -> dict[str, Peers]:
    """Form the groups inside and across the nodes for the meshes over which state is sharded, where the policy may
    choose them."""
    tiers = {}
    for view, mesh in enumerate(meshes):
        ranks = mesh.mesh.tolist()
        nodes = layout.by_node([coord.replica * layout.replica_size + rank for rank in ranks])
        if possible(collectives, device.backend, "shard", nodes) == ["flat"]:
            continue
        name = mesh.get_group().group_name
        form = _standalone(dist.PrefixStore(f"{view}/{ranks[0]}", store), device)
        me = mesh.get_local_rank()
        tiers[name] = Peers("shard", nodes, me, collectives, device.backend, form, own_flat=False)
    return tiers


def _standalone(store: dist.Store, device: Device) -> Form:
    def form(name: str, positions: list[int], me: int) -> Any:
        scope = dist.PrefixStore(name, store)
        group = device.standalone_group(scope, positions.index(me), len(positions), TIMEOUT)
        _standalone_groups.add(group)
        return group

    return form


class Door:
    """The sockets that were opened while the cross-replica groups formed: those of the groups, and of the store where
    they met. `interrupt` shuts them down from another thread, which ends every wait. Sockets inside the replica
    stay."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._lock = threading.Lock()
        self._own: set[str] | None = None  # None: they are being opened
        self._over = threading.Event()  # either formed or interrupted
        self._closed = False

    def form(self, work: Callable[[], T]) -> T:
        """Run `work`, which forms the groups, and return its result; raise as soon as the door is interrupted.

        While Gloo waits for a peer to connect, there is no socket that could be shut down: if that peer dies, the wait
        lasts until the groups' time-out. So `work` runs in a thread of its own, which is then abandoned."""
        formed: list[T] = []
        failed: list[BaseException] = []
        begun = threading.Event()

        def run() -> None:
            begun.set()
            try:
                formed.append(work())
            except BaseException as error:
                failed.append(error)
            self._over.set()

        # A process that is out of memory can start a thread that ends before its first line. Thread.start() waits for
        # that line without a limit, and would hold up the whole gang until it is killed.
        _thread.start_new_thread(run, ())
        if not begun.wait(BEGIN_S):
            raise MemoryError(f"a thread that forms the groups did not begin in {BEGIN_S:g} s")
        self._over.wait()
        with self._lock:
            if self._closed:
                raise dist.DistNetworkError("connection closed: the generation ended while its groups formed")
            self._own = _sockets().keys() - self._before.keys()
        if failed:
            raise failed[0]
        return formed[0]

    def interrupt(self) -> None:
        with self._lock:
            self._closed, now = True, _sockets()
            own = now.keys() - self._before.keys() if self._own is None else self._own
            for inode in own & now.keys():
                _shut(now[inode])
        self._over.set()


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process that are sockets, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[target] = int(name)
    return found


def _shut(fd: int) -> None:
    """End a TCP connection, or one to the rendezvous. A listening socket stays open, because Gloo aborts without it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens and (sock.family in (socket.AF_INET, socket.AF_INET6) or is_waiting_on(fd)):
            sock.shutdown(socket.SHUT_RDWR)


def break_connections() -> None:
    """End every TCP connection of this process and abort every group, so that a wait in a group, or to form one, fails
    at once, here and at the other ends. Gloo leaves a wait only when its sockets end; NCCL's waits are aborted. This
    runs in another thread than the one that waits, so torch's registry is left alone."""
    for fd in _sockets().values():
        _shut(fd)
    abort_all([*dist.distributed_c10d._world.pg_names, *_standalone_groups])
