"""Choose which network between hosts (rail) the next groups use. Peers must use the same one, so each publishes in the
rendezvous store which of its networks are up, and all take the first that is up everywhere."""

from __future__ import annotations

import os
from typing import Any

from phalanx.core.carrier import is_up


def choose(rails: list[dict[str, str]], store: Any, me: int, size: int) -> str:
    """Set and return the network interface of the groups that are formed next. NCCL reads it once per process, so its
    ranks stay on the first. Raise RuntimeError if no network is up on all hosts."""
    store.set(str(me), "".join("1" if is_up(rail["interface"]) else "0" for rail in rails))
    said = [store.get(str(rank)).decode() for rank in range(size)]
    for at, rail in enumerate(rails):
        if all(up[at] == "1" for up in said):
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = rail["interface"]
            return rail["interface"]
    raise RuntimeError(f"no network of run.networks is up on all hosts of a group; by rank: {said}")
