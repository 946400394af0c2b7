"""A worker: one rank of one job, for as long as its process lives. It is told by its node which generation of the gang
it belongs to (`form`), trains from `start` until the job is done, its peers are gone or a pause was agreed on, and then
keeps its state, without groups, until it is told more.

A step is computed, voted for by all ranks, and only then applied, without any communication: whoever has not seen all
votes keeps the gradients, and the next generation decides whether the step counts (`control.member`).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; here the ranks get it with the fork
import torch.distributed as dist

from phalanx.checkpoint.buddy import fetch
from phalanx.checkpoint.torch_state import rng_state, set_rng_state
from phalanx.control.member import Member
from phalanx.control.messages import Source
from phalanx.control.verdict import is_echo
from phalanx.core import document
from phalanx.core.checkpoint import BadCheckpoint, Facts
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import Coord, Layout
from phalanx.core.ledger import GENESIS, Record, bits, mean_loss
from phalanx.data.feed import Feed
from phalanx.data.samples import digest, places_of, unpack
from phalanx.model.family import Batch, check_family, load_family
from phalanx.observe.progress import Phase, Reading
from phalanx.parallel.device import Device, Moment, avoid_broken_amx
from phalanx.parallel.groups import Groups, break_connections, connect_store
from phalanx.parallel.reduce import StepFailed
from phalanx.parallel.shard import COMPUTE_DTYPE
from phalanx.train import transfer
from phalanx.train.engine import Engine, StepResult, apply
from phalanx.train.snapshots import Saver, resume, resume_from_checkpoint, resume_from_memory
from phalanx.train.state import State


def main(channel: Any, args: dict[str, Any]) -> None:
    Worker(channel, args).serve()


def prepare() -> None:
    """In the zygote, once: what each worker would have to find out anew."""
    avoid_broken_amx()


SOURCE_ERRORS = (BadCheckpoint, OSError, ValueError)  # the state that was to be had is not there, or not to be trusted


class Halted(RuntimeError):
    """The generation is over: the node has said so."""


class Commands:
    """What the node says. A thread hears it, since the trainer may be waiting for peers that are gone."""

    def __init__(self, channel: Any):
        self.generation = -1  # the one that the worker is in, or is entering
        self.halted = self.pausing = self.left = -1
        self.interval = (0, 0, 0)  # version, steps between durable checkpoints, and between snapshots in memory
        self._interruptible = False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._channel = channel
        threading.Thread(target=self._listen, daemon=True, name="phalanx-commands").start()

    def next(self) -> dict[str, Any] | None:
        """None: the node is gone."""
        return self._queue.get()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """What is done in here is in vain when the generation ends: Halted is raised in the middle of it."""
        with self._lock:
            self._interruptible = True
        try:
            yield
        finally:
            with self._lock:
                self._interruptible = False

    def _halt(self, generation: int) -> None:
        self.halted = max(self.halted, generation)
        if self.halted < self.generation:
            return
        break_connections()
        threading.Thread(target=self._insist, args=(generation,), daemon=True).start()
        with self._lock:
            if self._interruptible:
                main = ctypes.c_ulong(threading.main_thread().ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Halted))

    def _insist(self, generation: int) -> None:
        """A group may be connecting just when connections are broken, and wait on one that came later."""
        for _ in range(20):
            time.sleep(0.25)
            if self.left >= generation or self.generation > generation:
                return
            break_connections()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._channel.recv()) is not None:
                kind = message.get("type")
                if kind == "pause":
                    self.pausing = max(self.pausing, int(message["generation"]))
                elif kind == "interval":
                    self.interval = (int(message["version"]), int(message["steps"]), int(message["memory_steps"]))
                else:
                    if kind == "halt":
                        self._halt(int(message["generation"]))
                    self._queue.put(message)
        self._queue.put(None)


class Worker:
    def __init__(self, channel: Any, args: dict[str, Any]):
        job = Job.from_dict(args["job"])
        self.channel, self.args, self.job, self.rank = channel, args, job, int(args["rank"])
        self._quiet = Phase.starting
        self.local_ranks = int(args["local_ranks"])
        self.facts = document.make(Facts, args["facts"])
        torch.set_num_threads(num_threads(job, self.local_ranks))
        torch.manual_seed(job.seed)
        self.device = Device.pick(job.run.device, self.rank, job.layout.world_size, job.run.share_devices)
        self.family = load_family(job.model.family)
        check_family(self.family, job.model)
        coord = job.layout.coord(self.rank)
        self.state = State.create(job, self.family, coord, self.device, self._move)
        self.member = Member(int(args["worker"]), job.train.steps, generation=-1)
        self.giver = transfer.Giver(args["token"], self.device, args["host"])
        self.commands = Commands(channel)
        self.groups: Groups | None = None
        self.engine: Engine | None = None
        self.source: Batches | None = None
        self.saver: Saver | None = None
        self.result: StepResult | None = None  # of the step that was voted for and is not applied yet
        self.report: dict[str, Any] = {}  # of that
        self.record: Record | None = None  # of that, for the ledger
        self.rng = b""  # before the step that is under way
        self.moments: list[Moment] = []  # of the last step, between its phases
        self.told_facts = False

    def _move(self) -> None:
        """Note that it does something, while it starts or restores."""
        self.channel.progress.mark(self._quiet)

    # -- what it is told

    def serve(self) -> None:
        self._quiet = Phase.idle
        self.channel.send({"type": "up"})
        while (message := self.commands.next()) is not None:
            kind = message["type"]
            if kind == "leave":
                self._end()
                return
            getattr(self, "_on_" + kind)(message)

    def _on_form(self, form: dict[str, Any]) -> None:
        source = Source(**form["source"]) if form["source"] else None
        generation, m = int(form["generation"]), self.member
        if not m.form(generation, int(form["step"]), source):
            if generation == m.generation:
                self._say()
            return
        self.channel.progress.mark(Phase.idle)
        self.commands.generation = generation
        try:
            digest = self._enter(form, source)
        except Exception as error:
            self._left_by(error, generation)
        else:
            m.restored(self.state.step)
            self._say(digest)

    def _left_by(self, error: Exception, generation: int) -> None:
        """An error has ended the generation for this rank. After a halt any error is a consequence of it. Otherwise
        those of groups and of sources are survived; all others are this process's own, and end it."""
        m, halted = self.member, self.commands.halted >= generation
        own = isinstance(error, UserError)
        if m.phase == "restoring" and not halted and not own and isinstance(error, SOURCE_ERRORS):
            m.lack(f"{type(error).__name__}: {error}"[:500], damaged=isinstance(error, BadCheckpoint))
        elif halted or survivable(error):
            m.halt(generation, None if halted else why(error, self.channel.progress.read()))
        else:
            raise error
        self.channel.progress.mark(Phase.idle)
        print(f"generation {generation} ended at step {m.step}: {type(error).__name__}: {error}", flush=True)
        if m.phase == "parked" and m.why and "kind" in m.why:
            traceback.print_exception(error)
        traceback.clear_frames(error.__traceback__)  # they hold groups, and so their sockets
        self._leave_groups()
        self._say()

    def _say(self, digest: str = "") -> None:
        """Where it stands."""
        if said := self.member.standing(digest):
            self.channel.send(said)

    def _on_serve(self, message: dict[str, Any]) -> None:
        """It has no place in the next generation, but somebody who does takes its state from here."""
        generation, step = int(message["generation"]), int(message["step"])
        if not self.member.may_serve(generation):
            return
        with contextlib.suppress(ValueError):
            self._settle(step)
            self._offer(generation, step, message["store"])

    def _on_start(self, message: dict[str, Any]) -> None:
        if self.member.start(int(message["generation"])):
            self._run()
        elif self.member.phase == "parked":
            self._leave_groups()
            self._say()

    def _on_halt(self, message: dict[str, Any]) -> None:
        if self.member.halt(int(message["generation"])):
            self._leave_groups()
            self._say()

    def _on_save(self, message: dict[str, Any]) -> None:
        m, step = self.member, int(message["step"])
        if m.phase != "parked" or m.generation != int(message["generation"]):
            return
        with contextlib.suppress(ValueError):
            self._settle(step)
            if self.saver:
                self.saver.save(step)

    # -- a generation

    def _enter(self, form: dict[str, Any], source: Source | None) -> str:
        """Make the state, the groups and the engine of the generation. Returns the digest of the state."""
        generation, step = int(form["generation"]), int(form["step"])
        self._leave_groups()
        replicas, size = [int(r) for r in form["replicas"]], self.job.layout.replica_size
        layout = dataclasses.replace(self.job.layout, replica=len(replicas))
        job = dataclasses.replace(self.job, layout=layout)  # the same batch, divided among those that are there
        coord = layout.coord(replicas.index(self.rank // size) * size + self.rank % size)
        if source is None and self.member.step >= 0:
            self._settle(step)
        store, began = connect_store(*_address(form["store"])), time.perf_counter()
        if source is None or source.kind != "live":
            self._restore(job, coord, source, step)
            self._offer(generation, step, form["store"], store)
        else:
            address = store.get(f"g{generation}/state/{source.number}").decode()
            self._wait_for_snapshot()
            transfer.take(address, self.args["token"], generation, step, self.state, self.device, self._move)
        digest = transfer.digest_of(self.state)
        restored = time.perf_counter()
        self.groups = Groups.form(
            store, generation, layout, coord, self.device, bool(self.family.experts), job.collectives
        )
        self.engine = Engine(
            job, self.family, coord, self.groups, self.state, self.device, mark=self.channel.progress.mark
        )
        feed = Feed(self.args["data"]["address"], self.engine.indices, self.state.step, self._peers(replicas))
        self.source = Batches(job, feed, self.facts)
        self._keep_line(job, coord, generation)
        from_ = source.kind if source else "kept"
        took: dict[str, Any] = {"restore_s": restored - began, "form_s": time.perf_counter() - restored}
        if job.train.compress != "none":
            took["residuals"] = "zeroed"  # of the compressed gradients: they belonged to another membership
        self.channel.send({"type": "entered", "generation": generation, "source": from_, **took})
        if not self.told_facts and (source is None or source.kind != "live"):  # else it is like its peers
            self.told_facts = True
            self.channel.send({"type": "facts", **_facts(job, self.engine, self.device)})
        return digest

    def _settle(self, step: int) -> None:
        """Apply the step that was voted for if it counts; else it never happened. ValueError: it has not got `step`."""
        prepared = self.result
        if self.member.settle(step):
            assert prepared is not None
            self._wait_for_snapshot()
            apply(self.job, self.state, prepared)
            self._enter_ledger()
            self.channel.send(self.report)
        elif prepared is not None and self.rng:
            set_rng_state(self.device, self.rng)
        self.result = None

    def _restore(self, job: Job, coord: Coord, source: Source | None, step: int) -> None:
        if source is None:
            return
        self._wait_for_snapshot()
        if source.kind == "memory":
            self._drop_saver()
            token = self.args["keeper"]["token"]
            slot, made = fetch(_address(source.address), token, source.number, (step, source.made))
            layout = Layout(**made)
            resume_from_memory(layout, layout.coord(source.number), self.state, self.device, slot)
        elif source.kind == "durable":
            url = self.args["checkpoints"]
            about = (url, step, source.made, self.facts.lineage)
            resume_from_checkpoint(job, coord, self.state, self.device, *about, self._move)
        elif start := self.args["resume"]:
            place = (start["url"], start["name"], self.local_ranks, self._move)
            self.channel.send(resume(job, coord, self.state, self.device, *place))
        else:
            self._begin_anew(coord)
        if self.state.step != step:
            raise BadCheckpoint(f"it is of step {self.state.step} and not of {step}")

    def _begin_anew(self, coord: Coord) -> None:
        if self.state.step:
            self._drop_saver()
            self.state = State.create(self.job, self.family, coord, self.device, self._move)
        self.state.ledger = self.args["ledger"] or GENESIS
        torch.manual_seed(self.job.seed)

    def _offer(self, generation: int, step: int, address: str, store: Any = None) -> None:
        store = store or connect_store(*_address(address))
        self.giver.offer(generation, step, self.state)
        store.set(f"g{generation}/state/{self.member.worker}", self.giver.address)

    def _peers(self, replicas: list[int]) -> int:
        """Ranks of this node that work on the same micro-batches, itself included."""
        layout, own = self.job.layout, self.job.layout.coord(self.rank)
        here = range(layout.world_size)
        if self.local_ranks < layout.world_size:
            here = range(
                layout.node(self.rank) * layout.ranks_per_node, (layout.node(self.rank) + 1) * layout.ranks_per_node
            )
        coords = [layout.coord(rank) for rank in here if rank < layout.world_size]
        return sum((c.replica, c.shard) == (own.replica, own.shard) for c in coords if c.replica in replicas)

    def _keep_line(self, job: Job, coord: Coord, generation: int) -> None:
        """To the keeper of checkpoints; a new one when the rank writes other parts of the state than before."""
        keeper = self.args.get("keeper")
        if not keeper or "address" not in keeper:  # checkpoints are switched off
            return
        if self.saver and (self.saver.job.layout != job.layout or self.saver.state is not self.state):
            self._drop_saver()
        if self.saver is None:
            self.saver = Saver(job, coord, self.state, self.device, self.channel, keeper, self.commands, self.facts)
        self.saver.begin(generation)

    def _drop_saver(self) -> None:
        if self.saver:
            self.saver.close()
            self.saver = None

    def _wait_for_snapshot(self) -> None:
        if self.saver:
            self.saver.snapshots.wait()

    def _leave_groups(self) -> None:
        self.giver.withdraw()
        if self.source:
            self.source.feed.close()
        if self.engine:
            self.engine.close()
        if self.groups:
            self.groups.close()
        self.source = self.engine = self.groups = None
        self.commands.left = self.member.generation if self.member.phase == "parked" else self.commands.left

    # -- steps

    def _run(self) -> None:
        m = self.member
        self.giver.withdraw()
        try:
            while m.phase == "running":
                self._step()
        except Exception as error:
            self._left_by(error, m.generation)
            return
        self.channel.progress.mark(Phase.idle)
        self._leave_groups()
        self._say()

    def _step(self) -> None:
        m, state, channel, engine = self.member, self.state, self.channel, self.engine
        assert engine and self.source and self.groups
        began, step = time.perf_counter(), state.step
        channel.progress.mark(Phase.loading, step=step)
        self.rng = rng_state(self.device)
        batches, fed = self.source.take(step)
        with self.commands.interruptible():
            moments = [self.device.moment()]
            result = engine.gradients(batches)
            moments += [result.passed, self.device.moment()]
        self.report = self._tell_of(step, result, fed) | {"phases": self._phases()}
        if self.commands.halted >= m.generation or channel.progress.lease_ended:
            raise Halted("no controller was heard of, and the lease has ended")
        self.result = result
        wants_pause = m.vote() or self.commands.pausing >= m.generation
        version = self.commands.interval[0]
        vote = torch.tensor([1, wants_pause, version, version**2], device=self.device.torch)
        votes, pauses, total, squares = self.groups.total(vote)
        assert votes == engine.job.layout.world_size, (votes, engine.job.layout)
        channel.progress.mark(Phase.optimizer)
        if self.saver:
            self.report |= self.saver.before_update()
        moments.append(self.device.moment())
        engine.update(result)
        self.moments = [*moments, self.device.moment()]
        self._enter_ledger()
        self.result = None
        m.commit(pauses > 0)
        if self.saver:
            self.saver.after_update(result.grad_norm, known=total**2 == votes * squares)
        channel.send(self.report | {"time_s": time.perf_counter() - began})

    def _phases(self) -> dict[str, float]:
        """Seconds of the last step's phases. This one's are not over on the device, and nobody is to wait for them."""
        if not self.moments:
            return {}
        begin, passed, reduced, updating, updated = self.moments
        between = self.device.seconds_between
        return {
            "passes": between(begin, passed),
            "reduce": between(passed, reduced),
            "optimizer": between(updating, updated),
        }

    def _enter_ledger(self) -> None:
        """The step that was just applied, in the chain of those before it."""
        assert self.record
        record = dataclasses.replace(self.record, previous=self.state.ledger)
        self.state.ledger = record.hash()
        if self.report["whole"]:
            self.report["whole"]["record"] = record.to_line()

    def _tell_of(self, step: int, result: StepResult, fed: dict[str, Any]) -> dict[str, Any]:
        """What is reported of the step. All ranks exchange their losses, each bit pattern in a place of its own, so
        that whoever is left of the gang can report the whole of a step that counts."""
        engine, groups = self.engine, self.groups
        assert engine and groups
        job, coord = engine.job, engine.coord
        cp, mine = job.layout.cp, torch.zeros(1 + job.num_micro * job.layout.cp, dtype=torch.int64)
        mine = mine.to(self.device.torch)
        if not (coord.tp or coord.cp or coord.pp):  # its peers have had the same samples
            mine[0] = _signed(int(fed["data_digest"], 16))
        if coord.tp == 0 and result.loss_sums.numel():  # its peers have the same losses; cp ranks parts of them
            places = torch.tensor([1 + i * cp + coord.cp for i in engine.indices], device=self.device.torch)
            mine[places] = result.loss_sums.to(torch.float64).view(torch.int64)
        digest, *words = groups.total(mine)
        losses = [float(x) for x in torch.tensor(words, dtype=torch.int64).view(torch.float64).tolist()]
        norm = float(result.grad_norm)
        if not (math.isfinite(norm) and all(map(math.isfinite, losses))):
            raise FloatingPointError(
                f"step {step}: the loss is {math.fsum(losses)} and the gradient norm {norm}; "
                "lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the samples of this step"
            )
        tokens, batch = int(result.tokens), job.train.global_batch
        whole = {"loss_sums": losses, "tokens": tokens, "data_digest": f"{digest % (1 << 64):016x}"}
        self.record = Record(
            step=step,
            previous="",
            samples=(self.facts.cursor(step, batch), self.facts.cursor(step + 1, batch)),
            data_version=self.facts.data_version,
            loss_bits=bits(mean_loss(losses, tokens)),
            norm_bits=bits(norm),
            layout=self.job.to_dict()["layout"],
            generation=self.member.generation,
            rng="",
        )
        speaks = job.layout.inside(coord) == 0  # for its replica
        return {
            "type": "step",
            "step": step,
            "rank": self.rank,
            "generation": self.member.generation,
            "time_s": 0.0,
            "grad_norm": norm,
            "lr": result.lr,
            "data_wait_s": fed["data_wait_s"],
            "data_ready": fed["data_ready"],
            "served": fed["served"] if not (coord.tp or coord.cp or coord.pp) else {},
            "whole": whole if speaks else None,
        }

    def _end(self) -> None:
        self.channel.progress.mark(Phase.done)
        self._drop_saver()
        memory = self.device.peak_memory_bytes()
        self.channel.send(
            {"type": "done", "digest": self.state.digest(), "step": self.state.step, "memory_bytes": memory}
        )
        self._leave_groups()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def num_threads(job: Job, local_ranks: int) -> int:
    """CPU threads of a rank. A matrix product's last bits depend on them, so the exact reduction does
    not let them follow the number of ranks."""
    if job.run.threads or job.train.reduction == "exact":
        return job.run.threads or 1
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


class Batches:
    """The micro-batches of a rank, step by step: a function of the job alone, and of which micro-batches they are."""

    def __init__(self, job: Job, feed: Feed, facts: Facts | None = None):
        self.job, self.feed, self.facts = job, feed, facts or Facts()
        self.places = places_of(feed.indices, job.train.micro_batch)

    def take(self, step: int) -> tuple[list[Batch], dict[str, Any]]:
        """And what is to be reported of how they came."""
        got = self.feed.take(step)
        samples = unpack(got.rows, self.feed.eos)
        places = self.places + self.facts.cursor(step, self.job.train.global_batch)
        fed = {
            "data_wait_s": got.waited_s,
            "data_ready": got.ready,
            "data_digest": f"{digest(got.rows, places.tolist()):016x}",
            "served": got.served,
        }
        self.feed.release(step)
        masked = self.job.train.document_mask and samples.documents_BL is not None
        parts = [samples.tokens_BL, samples.targets_BL, samples.weights_BL]
        cut = [torch.from_numpy(part).split(self.job.train.micro_batch) for part in parts]
        if masked:
            cut.append(torch.from_numpy(samples.documents_BL).split(self.job.train.micro_batch))
        return [Batch(*tensors) for tensors in zip(*cut, strict=True)], fed


def survivable(error: Exception) -> bool:
    """Whether the process and its state are sound after it: what torch raises of groups whose members are gone or
    cannot meet. Gloo raises a bare RuntimeError, so one of the model's own counts too: it will come again, and end the
    run."""
    return type(error) in (RuntimeError, StepFailed, Halted) or isinstance(error, dist.DistError)


def why(error: Exception, at: Reading) -> dict[str, Any]:
    """What is reported of an error that ended the generation. That peers are gone all ranks say alike, so that their
    reports can be merged."""
    if is_echo(type(error).__name__, str(error)):
        return {"text": "it has lost its peers"}
    return {"kind": type(error).__name__, "text": str(error)[:500], "phase": at.phase.name, "step": at.step}


def _facts(job: Job, engine: Engine, device: Device) -> dict[str, Any]:
    peak, source = device.peak_flops(COMPUTE_DTYPE[job.train.precision])
    return {
        "device": device.describe(),
        "backend": device.backend,
        "peak_flops": peak,
        "peak_source": source,
        "num_params": engine.num_params,
        "torch": torch.__version__,
    }


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
