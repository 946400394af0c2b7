"""The process groups of one rank in one generation. A replica is its own torch world, with the mesh
inside it; across replicas there are only standalone groups, one set per coordinate."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.core.job import CollectivesConfig
from phalanx.core.layout import Coord, Layout
from phalanx.parallel.algorithms import possible
from phalanx.parallel.device import Device, abort_all
from phalanx.parallel.replica import Cross
from phalanx.parallel.tiers import Form, Peers

LOOPBACK = "127.0.0.1"
_standalone_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # those that torch's registry does not know
TIMEOUT = timedelta(seconds=600)
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
        generation: int,
        layout: Layout,
        coord: Coord,
        device: Device,
        experts: bool = False,
        collectives: CollectivesConfig = DEFAULT,
    ) -> Groups:
        """Collective over the replica, then over the replicas of this coordinate. `experts`: the model
        has some."""
        try:
            return Groups._form(store, generation, layout, coord, device, experts, collectives)
        except BaseException:
            # torch numbers groups, also those that it failed to make, and looks for its peers under that number.
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.distributed_c10d._world.group_count = 0
            raise

    @staticmethod
    def _form(
        store: dist.Store,
        generation: int,
        layout: Layout,
        coord: Coord,
        device: Device,
        experts: bool,
        collectives: CollectivesConfig,
    ) -> Groups:
        dist.init_process_group(
            device.backend,
            store=dist.PrefixStore(f"g{generation}/replica{coord.replica}", store),
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
        scope = dist.PrefixStore(f"g{generation}/tiers{coord.replica}", store)
        tiers = form_tiers(scope, layout, coord, device, [state] + ([view["edp"]] if view else []), collectives)
        return Groups(mesh, state, view, form_cross(store, generation, layout, coord, device, collectives), tiers)

    def total(self, values: torch.Tensor) -> list[int]:
        """Integers, each summed over all ranks: inside the replica, then across. Whoever gets the sums knows that all
        have said theirs."""
        if dist.get_world_size() > 1:
            dist.all_reduce(values)
        if self.cross:
            self.cross.sum_(values)
        return [int(x) for x in values.tolist()]

    def close(self) -> None:
        """Drops every group. The engine that used them must be gone: it holds references, and a
        group's sockets close with the last one."""
        if self.cross:
            self.cross.close()
        for peers in self.tiers.values():
            peers.close()
        for mesh in (self.mesh, self.experts):
            # DTensor's caches keep the first mesh of a kind for ever. Without its groups it holds no threads and
            # sockets, and finds those of a later generation, which have the same names.
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
) -> Cross | None:
    """The groups over all replicas that hold this coordinate."""
    if layout.replica == 1:
        return None
    form = _standalone(dist.PrefixStore(f"g{generation}/cross{layout.inside(coord)}", store), device)
    return Cross(Peers("replica", layout.peers_by_node(coord), coord.replica, collectives, device.backend, form))


def form_tiers(
    store: dist.Store,
    layout: Layout,
    coord: Coord,
    device: Device,
    meshes: list[DeviceMesh],
    collectives: CollectivesConfig,
) -> dict[str, Peers]:
    """For the meshes over which state is sharded: the groups inside and across the nodes, where the policy
    may choose them."""
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


def connect_store(host: str, port: int) -> dist.Store:
    return dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)


def break_connections() -> None:
    """End every TCP connection of this process and abort every group: who waits in one, or to form one, fails at once,
    here and at the other ends. Gloo leaves a wait only when its sockets end; what NCCL waits for is aborted. Called
    from another thread than the one that waits, so torch's registry is left alone."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(fd)) as sock:
                    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # Gloo aborts if that ends
                    if sock.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                        sock.shutdown(socket.SHUT_RDWR)
    abort_all([*dist.distributed_c10d._world.pg_names, *_standalone_groups])


def serve_store(channel: Any, args: dict[str, Any]) -> None:
    """The rendezvous store, in a process of its own: it lives on no rank. torch would listen on every
    interface; a socket that is bound already keeps it on one, loopback unless told otherwise."""
    host = str(args.get("host", LOOPBACK))
    with socket.create_server((host, 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=os.dup(listener.fileno()),  # the store closes its own copy
        )
    channel.send({"type": "store", "host": host, "port": server.port})
    while channel.recv() is not None:
        pass
