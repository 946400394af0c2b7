"""The keeper: one process per node that owns the snapshots of its ranks and writes them out. It shares no interpreter
lock with a trainer, and it lives on when a worker dies.

A worker connects to an abstract Unix socket, sends the size of its image, and gets the descriptors of its slots. It
fills a slot during its next forward and backward pass and reports it, sealed; what an accelerator copied the keeper
seals. The keeper verifies the slot, writes the rank's file, reports to its node, and commits the checkpoint when it
hears that all ranks are done. An order may come twice: what is already written is reported again. A keeper with a buddy
first sends it a copy of every sealed snapshot.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.checkpoint import files
from phalanx.checkpoint.best import Best
from phalanx.checkpoint.buddy import BuddyServer, Held, push
from phalanx.checkpoint.catalog import OWNER, Catalog
from phalanx.checkpoint.memory import SLOTS, Slot, num_slots, slot_bytes
from phalanx.core import lease
from phalanx.core.checkpoint import BadCheckpoint, Manifest, Plan, Segment, file_name, word_of
from phalanx.core.errors import UserError
from phalanx.core.store import open_store
from phalanx.gate.peers import Peers

PACKET_BYTES = 1 << 16
WRITERS = 4
NOT_HELD = "no snapshot of it is in memory any more"
KEPT_REPORTS = 16  # of checkpoints, in case they are asked for again
LAST_RETAIN_S = 20.0  # for the last retention, before the end of the run


@dataclass
class Rank:
    slots: list[Slot]
    layout: Any = None  # of the slots, as JSON
    conn: socket.socket | None = None
    written: dict[str, dict[str, Any] | None] = field(
        default_factory=dict
    )  # checkpoint -> its report; None: on its way


class Keeper:
    """Owns the snapshots of a node's ranks. `url`: where checkpoints go. `run`: the random mark of this run, by which
    it owns that place."""

    def __init__(
        self,
        channel: Any,
        url: str,
        ranks: int,
        keep: tuple[int, int],
        peers: Peers,
        has_buddy: bool,
        run: str = "",
        last: int = -1,
    ):
        """`last`: the run's last step; -1: not known."""
        self.run, self.last = run, last
        self.channel, self.keep, self.num_ranks, self.peers, self.has_buddy = channel, keep, ranks, peers, has_buddy
        self.store = open_store(url)
        self.catalog = Catalog(self.store)
        self.ranks: dict[int, Rank] = {}
        self.slots = SLOTS  # of each rank
        self.base: dict[str, Any] | None = None  # what all manifests of the run have in common
        self.buddy: tuple[str, int] | None = None
        self.lock = threading.Lock()
        self.torn: set[str] = set()  # half-written files that could not be removed
        self.committed: dict[str, dict[str, Any] | None] = {}  # checkpoint -> its report; None: on its way
        self.writers = ThreadPoolExecutor(WRITERS, "phalanx-drain")
        self.hashers = ThreadPoolExecutor(WRITERS, "phalanx-hash")
        self.committer = ThreadPoolExecutor(1, "phalanx-commit")  # one at a time, in the order of the commands
        self.retainer = ThreadPoolExecutor(1, "phalanx-retain")  # separate, so that no commit waits for it
        self.retaining: Future[None] | None = None
        self.server = BuddyServer(peers, self._own)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0phalanx-keeper-{secrets.token_hex(16)}")
        self.listener.listen(1024)
        self.address = self.listener.getsockname()[1:].decode()

    # -- connections and messages

    def serve(self) -> None:
        """Serve until the channel ends."""
        os.nice(10)  # the trainers have priority
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        selector.register(self.channel, selectors.EVENT_READ)
        self.channel.send({"type": "keeper", "address": self.address, "port": self.server.port})
        while True:
            for key, _ in selector.select():
                if key.fd == self.channel.fileno():
                    if not self._obey():
                        return
                elif key.fileobj is self.listener:
                    conn, _ = self.listener.accept()
                    if self._welcome(conn):
                        selector.register(conn, selectors.EVENT_READ)
                elif not self._hear(key.fileobj):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]

    def _obey(self) -> bool:
        """Execute all orders that have arrived. Return False when the channel has ended."""
        with contextlib.suppress(TimeoutError):
            while (order := self.channel.recv(0)) is not None:
                self.order(order)
            return False
        return True

    def _welcome(self, conn: socket.socket) -> bool:
        uid = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        conn.settimeout(10.0)
        try:
            if uid != os.getuid():
                raise ValueError("another user")
            data, fds, _, _ = socket.recv_fds(conn, PACKET_BYTES, 1)
            hello = json.loads(data)
            rank, image, own = int(hello["rank"]), int(hello["image_bytes"]), int(hello["own_bytes"])
            with open(fds[0], "rb") as file:  # the manifest's base, too long for a packet
                base = json.loads(file.read())
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            conn.close()
            return False
        slots: list[Slot] = []
        try:
            slots = self._slots(rank, image, own)
            self._try_folder()
            reply = {"type": "welcome", "newest": self._newest(rank)}
        except (UserError, OSError) as error:
            slots, reply = [], {"type": "refused", "text": str(error)}
        try:
            socket.send_fds(conn, [json.dumps(reply).encode()], [slot.fd for slot in slots])
        except OSError:  # the worker has died meanwhile
            slots = []
        if not slots:
            conn.close()
            return False
        self.base = base
        self.ranks[rank].conn, self.ranks[rank].layout = conn, base["layout"]
        return True

    def _slots(self, rank: int, image: int, own: int) -> list[Slot]:
        held = self.ranks.get(rank)
        if held and (held.slots[0].image_bytes, held.slots[0].own_bytes) == (image, own):
            return held.slots
        if not self.ranks:
            self._set_slots(num_slots(self.num_ranks, slot_bytes(image, own), self.has_buddy))
        try:
            slots = [Slot(image, own) for _ in range(self.slots)]
        except OSError as error:
            raise UserError(
                f"{self.slots} snapshots of {image / 1e6:,.1f} MB cannot be held in memory: {error.strerror}",
                field="checkpoint.every_steps",
                value=0,
                remedy="raise the limits of this user or container, or set checkpoint.every_steps = -1",
            ) from None
        self.ranks[rank] = Rank(slots)
        return slots

    def _set_slots(self, count: int) -> None:
        self.slots = count
        if count < SLOTS:
            self.server.most = 0
            self.channel.send({"type": "checkpoint_memory", "rank": -1, "slots": count, "wanted": SLOTS})

    def _try_folder(self) -> None:
        """Check that the folder can be written to, so that a wrong one is reported at the start and not at the first
        checkpoint."""
        if self.store.is_local:
            path = self.store.path  # type: ignore[attr-defined]
            try:
                files.make_root(path)
                probe = path / f".probe-{secrets.token_hex(4)}"
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(
                    f"no checkpoint can be written there: {error.strerror}",
                    field="checkpoint.dir",
                    value=str(path),
                    remedy="name a folder that you may write to, on a disk with room, or the URL of a bucket",
                ) from None

    def _newest(self, rank: int) -> int:
        """Return the slot with the newest whole snapshot; -1: none."""
        headers = [slot.header() for slot in self.ranks[rank].slots]
        steps = [header["step"] if header else -1 for header in headers]
        return steps.index(max(steps)) if max(steps) >= 0 else -1

    def _hear(self, conn: socket.socket) -> bool:
        """Handle a rank's report that it has filled a slot. Return False if the rank is gone."""
        try:
            data = conn.recv(PACKET_BYTES)
        except OSError:
            data = b""
        rank = next((number for number, held in self.ranks.items() if held.conn is conn), None)
        if rank is None:  # the rank has reconnected since
            return False
        if not data:
            self.ranks[rank].conn = None
            return False
        said = json.loads(data)
        slot = int(said["slot"])
        self.writers.submit(self._take, rank, slot, bool(said["durable"]), said["seal"], said["about"])
        return True

    # -- the work

    def _take(
        self, rank: int, number: int, durable: bool, to_seal: dict[str, Any] | None, about: dict[str, Any]
    ) -> None:
        slot = self.ranks[rank].slots[number]
        try:
            if to_seal and not self._seal(rank, slot, to_seal["header"], int(to_seal["sum"])):
                return
            held = {"memory": int(about["step"])}
            if self.buddy and self.slots == SLOTS and self._copy(rank, slot):
                held["buddy"] = held["memory"]
            self._tell(rank, {"held": held})
            if durable:
                self._drain(rank, slot, about)
        finally:
            self._tell(rank, {"slot": number})  # the rank may overwrite it

    def _seal(self, rank: int, slot: Slot, header: dict[str, Any], want: int) -> bool:
        """Hash what an accelerator has copied, and seal it if its sum is the one that the device computed."""
        list(self.hashers.map(slot.put_hash, range(len(slot.bounds))))
        assert self.base is not None
        base = Manifest.from_json(json.dumps(self.base).encode())
        plan, image = Plan.of(base.entries, base.layout, base.layout.coord(rank)), slot.array()

        def sum_of(s: Segment) -> int:
            return int(image[s.offset : s.offset + s.size].view(word_of(s.size)).sum(dtype=np.int64))

        sums = self.hashers.map(sum_of, plan.segments)
        found = sum((2 * i + 1) * each for i, each in enumerate(sums))
        if (found - want) % (1 << 64):
            reason = f"what the device copied has the sum {found % (1 << 64)} instead of {want % (1 << 64)}"
            self._failed(rank, header, reason, gone=True)
            return False
        slot.seal(header)
        return True

    def _copy(self, rank: int, slot: Slot) -> bool:
        """Copy a slot to the buddy node. Return whether it arrived."""
        assert self.buddy
        try:
            push(self.peers, self.buddy, rank, slot, self.ranks[rank].layout)
        except Exception as error:  # the file is written anyway
            self.channel.send({"type": "buddy_failed", "rank": rank, "reason": str(error)})
            return False
        return True

    def _drain(self, rank: int, slot: Slot, about: dict[str, Any] | None = None) -> None:
        """Write the rank's file from its slot. `about`: what the slot should hold."""
        began, header = time.perf_counter(), slot.header()
        if header is None or (about and not _is_of(header, about)):
            if about:
                reason = NOT_HELD if header else "the seal of the snapshot in memory does not hold"
                self._failed(rank, about, reason, gone=True)
            return None
        name, written = header["checkpoint"], self.ranks[rank].written
        target = f"{name}/{file_name(rank)}"
        with self.lock:
            if name in written:
                if (report := written[name]) is not None:
                    self.channel.send(report)
                return None
            written[name] = None
            while len(written) > KEPT_REPORTS:
                del written[next(iter(written))]
        is_whole = False
        try:
            slot.verify(own=True)
            is_whole = True
            if rank == 0:
                self.catalog.begun(name, int(header["world_size"]))
            files.make_folder(self.store, name)
            said = {key: header[key] for key in ("checkpoint", "rank", "step")}
            tail = files.make_tail(said, base64.b64decode(header["rng"]), slot.hashes(own=True))
            if target in self.torn:
                self._remove_torn(target)
            files.write_file(self.store, target, slot.image[: slot.own_bytes], tail)
        except Exception as error:  # an error in a writer's thread would go unnoticed
            if not isinstance(error, FileExistsError):
                with contextlib.suppress(OSError):
                    self._remove_torn(target)
            written.pop(name, None)
            return self._failed(rank, header, str(error), gone=not is_whole)
        size = slot.own_bytes + len(tail)
        drain_s = time.perf_counter() - began
        about = {key: header[key] for key in ("checkpoint", "step", "generation", "seal")}
        about |= {"rank": rank, "ranks": int(header["world_size"]), "root": files.root_of(tail)}
        report = {"type": "shard", **about, "size": size, "drain_s": drain_s}
        with self.lock:
            written[name] = report
        self.channel.send(report)
        return None

    def _remove_torn(self, target: str) -> None:
        """Remove a half-written file, which would block the next attempt."""
        self.torn.add(target)
        with contextlib.suppress(FileNotFoundError):
            self.store.remove(target)
        self.torn.discard(target)

    def _failed(self, rank: int, about: dict[str, Any], reason: str, gone: bool = False) -> None:
        """Report that a checkpoint failed. `gone`: nothing is left from which it could be written."""
        said: dict[str, Any] = {"type": "checkpoint_failed", "rank": rank, "gone": gone}
        said |= {key: about[key] for key in ("checkpoint", "step", "generation") if key in about}
        self.channel.send({**said, "reason": f"{self.store.url}: {reason}"})

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        conn = self.ranks[rank].conn
        if conn:
            with contextlib.suppress(OSError):  # it is gone, which the next read reports
                conn.send(json.dumps(message).encode())

    def order(self, order: dict[str, Any]) -> None:
        """Execute an order of the node."""
        kind = order.get("type")
        if kind == "commit":
            if self._is_new(order["checkpoint"]):
                self.committer.submit(self._commit, order)
        elif kind == "buddy":
            self.buddy = (str(order["host"]), int(order["port"]))
        elif kind == "held":
            self.channel.send({"type": "held", "copies": self.copies()})
        elif kind == "write":
            self._write(int(order["step"]), int(order["generation"]))

    def _own(self, rank: int) -> list[Held]:
        found = self.ranks.get(rank)
        return [(slot, found.layout) for slot in found.slots] if found else []

    def copies(self) -> list[tuple[int, int, int]]:
        """List rank, step and generation of all whole snapshots here, its own ranks' and those kept for others."""
        slots = [(rank, slot) for rank, held in self.ranks.items() for slot in held.slots]
        slots += [(rank, slot) for rank, kept in list(self.server.copies.items()) for slot in list(kept)]
        found = ((rank, slot.header()) for rank, slot in slots)
        return sorted({(rank, header["step"], header["generation"]) for rank, header in found if header})

    def _write(self, step: int, generation: int) -> None:
        """Write a step from the snapshots in memory. Every rank is reported, or the controller would wait for its file.
        Only a connected rank that has not reached the step is left out, if others are reported: it will report
        itself."""
        about, answered = {"step": step, "generation": generation}, False
        for rank, held in self.ranks.items():
            reports = [report for report in list(held.written.values()) if report and about.items() <= report.items()]
            headers = [header for slot in held.slots if (header := slot.header())]
            if reports:
                self.channel.send(reports[-1])
            elif slot := next((slot for slot in held.slots if _is_of(slot.header(), about)), None):
                self.writers.submit(self._drain, rank, slot, about)
            elif held.conn and all((h["generation"], h["step"]) < (generation, step) for h in headers):
                continue
            else:
                self._failed(rank, about, NOT_HELD, gone=True)
            answered = True
        if not answered:
            self._failed(0, about, NOT_HELD, gone=True)

    def _is_new(self, name: str) -> bool:
        """Return whether a checkpoint is yet to be committed. One in progress is not queued again; a finished one is
        reported again."""
        with self.lock:
            if name in self.committed:
                if (report := self.committed[name]) is not None:
                    self.channel.send(report)
                return False
            self.committed[name] = None
            while len(self.committed) > KEPT_REPORTS:
                del self.committed[next(iter(self.committed))]
        return True

    def _commit(self, order: dict[str, Any]) -> None:
        began, name = time.perf_counter(), order["checkpoint"]
        try:
            parts: dict[str, Any] = {key: order[key] for key in ("step", "generation", "files")}
            parts |= {"made": time.time(), "name": name, **json.loads(order["seal"])}
            if self.base is None:
                raise OSError("no rank has told this keeper what its checkpoints are of")
            self._check_owner()
            manifest = Manifest.from_json(json.dumps({**self.base, **parts}).encode())
            with contextlib.suppress(FileExistsError):
                files.commit(self.store, manifest)
            there = files.read_manifest(self.store, name)  # another keeper, or an earlier one here, may have won
            if (there.files, there.generation) != (manifest.files, manifest.generation):
                raise OSError("another checkpoint has this name")
            self.catalog.added(manifest)
        except Exception as error:
            self.committed.pop(name, None)
            self._failed(-1, order, f"it could not be committed: {type(error).__name__}: {error}")
            return
        about = {"checkpoint": name, "step": order["step"], "generation": order["generation"]}
        report = {"type": "committed", **about, "drain_s": time.perf_counter() - began + self._drain_s(name)}
        if self.retaining:
            self.retaining.cancel()  # if it has not begun, the new one does its work
        self.retaining = self.retainer.submit(self._retain, name)
        if order["step"] == self.last:  # the run ends with this report, and this process with it
            with contextlib.suppress(TimeoutError):
                self.retaining.result(LAST_RETAIN_S)
        with self.lock:
            self.committed[name] = report
        self.channel.send(report)

    def _check_owner(self) -> None:
        """Check that no other run has taken over this place while this one was believed to be dead."""
        owner = lease.read(self.store, OWNER) if self.run else {}
        if owner.get("run", self.run) != self.run:
            raise OSError(f"it belongs to a run on {owner.get('host')} now, which has taken it over")

    def _drain_s(self, name: str) -> float:
        """Return the longest time that a rank's file of this checkpoint took here."""
        reports = [held.written.get(name) for held in self.ranks.values()]
        return max((report["drain_s"] for report in reports if report), default=0.0)

    def _retain(self, name: str) -> None:
        try:
            lineage = str(self.base["lineage"]) if self.base else ""
            self._check_owner()
            best = Best.read(self.store)
            spares = best.spares if best and best.lineage == lineage else lambda step: False
            removed = self.catalog.retain(*self.keep, self.channel.send, lineage, spares)
        except (OSError, UserError, BadCheckpoint) as error:
            self.channel.send({"type": "checkpoint_not_removed", "checkpoint": name, "reason": str(error)})
            return
        if removed:
            self.channel.send({"type": "checkpoints_removed", "names": removed})


def _is_of(header: dict[str, Any] | None, about: dict[str, Any]) -> bool:
    """Return whether a snapshot is of this step and generation."""
    return header is not None and all(header[key] == about[key] for key in ("step", "generation"))


def check_shared(url: str, run: str) -> None:
    """Check that this host sees the place that the run has taken, and not a folder of the same name on its own disk."""
    if run and not lease.read(open_store(url), OWNER):
        raise UserError(
            "this host does not see what the run has written there: it is another disk",
            field="checkpoint.dir",
            value=url,
            remedy="name a bucket, s3://..., or a folder that all hosts share",
        )


def main(channel: Any, args: dict[str, Any]) -> None:
    keep = (int(args["keep_last"]), int(args["keep_every"]))
    check_shared(args["url"], str(args.get("run", "")))
    Keeper(
        channel,
        args["url"],
        int(args["ranks"]),
        keep,
        Peers(**args["peers"], host=args["host"]),
        bool(args["has_buddy"]),
        str(args.get("run", "")),
        int(args.get("last", -1)),
    ).serve()


class Line:
    """A worker's connection to its keeper."""

    def __init__(self, address: str, rank: int, image_bytes: int, own_bytes: int, base: bytes):
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.connect("\0" + address)
        fd = os.memfd_create("phalanx-manifest")
        try:
            os.write(fd, base)
            os.lseek(fd, 0, os.SEEK_SET)
            hello = {"rank": rank, "image_bytes": image_bytes, "own_bytes": own_bytes}
            socket.send_fds(self._sock, [json.dumps(hello).encode()], [fd])
        finally:
            os.close(fd)
        data, fds, _, _ = socket.recv_fds(self._sock, PACKET_BYTES, SLOTS)
        reply = json.loads(data) if data else {"type": "refused", "text": "the keeper closed the connection"}
        if reply["type"] == "refused":
            raise UserError(reply["text"])
        self.newest = int(reply["newest"])  # the slot with the newest snapshot from before; -1: none
        self.slots = [Slot(image_bytes, own_bytes, fd) for fd in fds]
        self.busy: set[int] = set()  # slots that the keeper still reads
        self.held: dict[str, int] = {}  # this rank's newest step in memory here, and at the buddy node

    def done(self, slot: int, durable: bool, about: dict[str, Any], to_seal: dict[str, Any] | None = None) -> None:
        """Say that a slot is filled. `about`: its checkpoint, step and generation; `to_seal`: the keeper is to hash it,
        compare its "sum", and seal it with "header"."""
        self.busy.add(slot)
        self._sock.send(json.dumps({"slot": slot, "durable": durable, "seal": to_seal, "about": about}).encode())

    def wait_free(self, slot: int) -> None:
        self.listen(block=False)
        while slot in self.busy:
            self.listen(block=True)

    def listen(self, block: bool) -> None:
        self._sock.setblocking(block)
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._sock.recv(PACKET_BYTES)
                if not data:
                    raise ConnectionError("the checkpoint keeper closed the connection")
                said = json.loads(data)
                self.busy.discard(said.get("slot", -1))
                self.held |= said.get("held", {})
                self._sock.setblocking(False)

    def close(self) -> None:
        self._sock.close()
