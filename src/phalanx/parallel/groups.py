"""The process groups of one rank in one generation. A replica is its own torch world, with the mesh
inside it; across replicas there are only standalone groups, one set per coordinate."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.core.layout import Coord, Layout
from phalanx.parallel.device import Device
from phalanx.parallel.replica import Cross

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=600)


@dataclass
class Groups:
    mesh: DeviceMesh  # pp x shard x cp x tp
    state: DeviceMesh  # over which a stage's state is sharded: shard x cp
    experts: DeviceMesh | None  # the same ranks seen by the experts: edp x ep
    cross: Cross | None

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
        store: dist.Store, generation: int, layout: Layout, coord: Coord, device: Device, experts: bool = False
    ) -> Groups:
        """Collective over the replica, then over the replicas of this coordinate. `experts`: the model
        has some."""
        dist.init_process_group(
            device.backend,
            store=dist.PrefixStore(f"g{generation}/replica{coord.replica}", store),
            rank=layout.inside(coord),
            world_size=layout.replica_size,
            timeout=TIMEOUT,
        )
        kind = device.torch.type
        sizes = (layout.pp, layout.shard, layout.cp, layout.tp)
        mesh = init_device_mesh(kind, sizes, mesh_dim_names=("pp", "shard", "cp", "tp"))
        state = mesh["shard"] if layout.cp == 1 else mesh["shard", "cp"]._flatten("state")
        view = None
        if experts:
            sizes_e = (layout.pp, layout.stage_size // layout.ep, layout.ep)
            view = init_device_mesh(kind, sizes_e, mesh_dim_names=("pp_e", "edp", "ep"))
        return Groups(mesh, state, view, form_cross(store, generation, layout, coord, device))

    def close(self) -> None:
        """Drops every group. The engine that used them must be gone: it holds references, and a
        group's sockets close with the last one."""
        if self.cross:
            self.cross.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def form_cross(store: dist.Store, generation: int, layout: Layout, coord: Coord, device: Device) -> Cross | None:
    """The groups over all replicas that hold this coordinate; two levels when nodes hold several."""
    if layout.replica == 1:
        return None
    nodes = layout.peers_by_node(coord)
    if len(nodes) == 1 or len({len(n) for n in nodes}) > 1 or len(nodes[0]) == 1:
        nodes = [[replica] for replica in range(layout.replica)]  # one level: each by itself
    mine = next(n for n in nodes if coord.replica in n)
    column = mine.index(coord.replica)
    prefix = f"g{generation}/cross{layout.inside(coord)}"

    def group(name: str, ranks: list[int]) -> Any:
        scope = dist.PrefixStore(f"{prefix}/{name}", store)
        return device.standalone_group(scope, ranks.index(coord.replica), len(ranks), TIMEOUT)

    across = group(f"across{column}", [n[column] for n in nodes])
    inside = group(f"inside{nodes.index(mine)}", mine) if len(mine) > 1 else None
    return Cross(across, inside, nodes=nodes, me=coord.replica)


def connect_store(host: str, port: int) -> dist.Store:
    return dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)


def serve_store(channel: Any, args: dict[str, Any]) -> None:
    """The rendezvous store, in a process of its own: it lives on no rank. torch would listen on every
    interface; a socket that is bound already keeps it on loopback."""
    with socket.create_server((LOOPBACK, 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=TIMEOUT,
            master_listen_fd=os.dup(listener.fileno()),  # the store closes its own copy
        )
    channel.send({"type": "store", "host": LOOPBACK, "port": server.port})
    while channel.recv() is not None:
        pass
