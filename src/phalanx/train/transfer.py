"""Send a state from a worker that has it to one that takes a place at the same coordinate. Over a proven connection
(`gate.peers`) come the step, the random state and the bytes of every tensor, each followed by its hash.

The giver's thread reads the state while the giver forms its groups. The state is on offer as soon as it is that of the
step from which the generation continues, until `withdraw`, before the next update.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import xxhash
from torch import Tensor

from phalanx.checkpoint.torch_state import as_bytes, content_sum, rng_state, set_rng_state
from phalanx.core.checkpoint import BadCheckpoint
from phalanx.gate.peers import PIECE_BYTES, TIMEOUT_S, Peers, Stream
from phalanx.parallel.device import Device
from phalanx.train.state import State

PATIENCE_S = 10.0  # how long to wait until the giver has the step
NAMES_BYTES = 1 << 24  # of the reply that names the tensors


class Giver:
    def __init__(self, peers: Peers, device: Device):
        self._device = device
        self._offer: tuple[int, int, State] | None = None  # generation, step
        self._changed = threading.Condition()
        self._giving = 0
        self.port = peers.listen(self._serve).port

    def offer(self, generation: int, step: int, state: State) -> None:
        with self._changed:
            self._offer = generation, step, state
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Withdraw the offer, and wait until nobody reads it any more."""
        with self._changed:
            self._offer = None
            self._changed.wait_for(lambda: not self._giving, TIMEOUT_S)

    def _serve(self, conn: Stream) -> None:
        hello = conn.receive()
        wanted = (int(hello["generation"]), int(hello["step"]))
        with self._changed:
            there = self._changed.wait_for(lambda: self._offer is not None and self._offer[:2] == wanted, PATIENCE_S)
            if not there or self._offer is None:
                conn.send({"error": f"it does not have step {wanted[1]} in generation {wanted[0]}"})
                return
            state = self._offer[2]
            self._giving += 1
        try:
            self._give(conn, state)
        finally:
            with self._changed:
                self._giving -= 1
                self._changed.notify_all()

    def _give(self, conn: Stream, state: State) -> None:
        self._device.use()
        held = state.names()
        sizes = [_bytes_of(state.get(name)) for name in held]
        about = {"rng": rng_state(self._device).hex(), "updates": state.updates, "ledger": state.ledger}
        about["recent"] = state.recent
        conn.send({"error": "", **about, "names": held, "sizes": sizes})
        for name in held:
            data = as_bytes(state.get(name).detach()).cpu().numpy()
            hasher = xxhash.xxh3_128()
            for at in range(0, len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                hasher.update(piece)
                conn.sendall(piece)
            conn.sendall(hasher.digest())


def take(
    peers: Peers,
    address: tuple[str, int],
    generation: int,
    step: int,
    state: State,
    device: Device,
    progress: Callable[[], object] = lambda: None,
) -> int:
    """Fill `state` with that of `address`, which is at `step`, and return the number of bytes received. Raise
    BadCheckpoint or OSError."""
    received = 0
    with peers.dial(address) as conn:
        conn.send({"generation": generation, "step": step})
        reply = conn.receive(NAMES_BYTES)
        if reply["error"]:
            raise BadCheckpoint(reply["error"])

        def fill(get: Any) -> None:
            nonlocal received
            for name, size in zip(reply["names"], reply["sizes"], strict=True):
                room = get(name).detach()
                if _bytes_of(room) != size:
                    raise BadCheckpoint(f"{name} has {size} bytes there and {_bytes_of(room)} here")
                direct = room.is_cpu and room.is_contiguous()
                target = room if direct else torch.empty(room.shape, dtype=room.dtype)
                view = memoryview(as_bytes(target).numpy())
                conn.fill(view)
                digest = bytearray(16)
                conn.fill(memoryview(digest))
                if xxhash.xxh3_128(view).digest() != digest:
                    raise BadCheckpoint(f"{name} was damaged on its way")
                if not direct:
                    room.copy_(target)
                received += size
                progress()

        state.restore(fill, step, int(reply["updates"]))
        state.ledger, state.recent = str(reply["ledger"]), list(reply["recent"])
    set_rng_state(device, bytes.fromhex(reply["rng"]))
    return received


def digest_of(state: State) -> str:
    """Hash everything that a rank holds. The hash is the same for the same coordinate of all replicas."""
    out = hashlib.blake2b(str(state.step).encode(), digest_size=16)
    for name in state.names():
        data = as_bytes(state.get(name).detach())
        # A device sums its memory faster than the host could read it.
        out.update(xxhash.xxh3_128_digest(data.numpy()) if data.is_cpu else _pack(content_sum(data)))
    return out.hexdigest()


def _pack(value: Tensor) -> bytes:
    return (int(value) % (1 << 64)).to_bytes(8, "little")


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
