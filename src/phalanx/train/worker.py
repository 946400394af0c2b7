"""A worker: one rank of one job, for as long as its process lives. Its node tells it to build the world of its replica
(`build`: groups and engine) and to enter a generation of the gang (`form`). It trains until the job is done, a pause
was agreed on, or other replicas are gone. Then its replica leaves the generation intact: it keeps its world, its engine
and the gradients that it has computed, and waits for the next. Only what breaks inside its own replica costs the world.

A step is computed, voted for by all ranks, and only then applied, without any communication: a rank that has not seen
all votes keeps the gradients, and the next generation decides whether the step counts (`control.member`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; here the ranks get it with the fork
import torch.distributed as dist

from phalanx.checkpoint.buddy import fetch
from phalanx.control.member import Member, in_common
from phalanx.control.messages import Source
from phalanx.control.verdict import is_echo
from phalanx.core import document
from phalanx.core.checkpoint import BadCheckpoint, Facts
from phalanx.core.deal import Deal, deal
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import Coord, Layout
from phalanx.core.ledger import GENESIS, Record, bits, mean_loss
from phalanx.core.limits import num_cores
from phalanx.data.feed import Feed
from phalanx.gate.peers import Peers
from phalanx.model.family import check_family, load_family
from phalanx.observe.phases import VOTE
from phalanx.observe.progress import Phase, Reading
from phalanx.parallel import rails
from phalanx.parallel.cross import Cross
from phalanx.parallel.device import Device, avoid_broken_amx
from phalanx.parallel.groups import Door, Groups, form_cross
from phalanx.parallel.reduce import StepFailed
from phalanx.parallel.rendezvous import MeetingStore
from phalanx.parallel.shard import COMPUTE_DTYPE
from phalanx.train import transfer
from phalanx.train.batches import Batches
from phalanx.train.engine import Engine, StepResult, apply
from phalanx.train.orders import Commands, Halted
from phalanx.train.skips import in_a_row, suspects, why_skip
from phalanx.train.snapshots import Saver, resume, resume_from_checkpoint, resume_from_memory
from phalanx.train.state import State
from phalanx.train.timed import Timed
from phalanx.train.tracer import Tracer
from phalanx.train.validator import Validator


def main(channel: Any, args: dict[str, Any]) -> None:
    Worker(channel, args).serve()


def prepare() -> None:
    """Find out once, in the zygote, what each worker would have to find out anew."""
    avoid_broken_amx()


SOURCE_ERRORS = (BadCheckpoint, OSError, ValueError)  # the state at the source is missing, or cannot be trusted


class Worker:
    def __init__(self, channel: Any, args: dict[str, Any]):
        job = Job.from_dict(args["job"])
        self.channel, self.args, self.job, self.rank = channel, args, job, int(args["rank"])
        self._quiet = Phase.starting
        self.local_ranks = int(args["local_ranks"])
        self.facts = document.make(Facts, args["facts"])
        seat, ranks = int(args["local_rank"]), self.local_ranks
        if args["shared"]:  # all ranks of the job are on this machine, even if it plays several nodes
            seat, ranks = self.rank, job.layout.world_size
        torch.set_num_threads(num_threads(job, ranks))
        torch.manual_seed(job.seed)
        self.device = Device.pick(job.run.device, seat, ranks, job.run.share_devices)
        self.family = load_family(job.model.family)
        check_family(self.family, job.model)
        coord = job.layout.coord(self.rank)
        self.state = State.create(job, self.family, coord, self.device, self._move)
        self.member = Member(int(args["worker"]), job.train.steps, speaks=job.layout.inside(coord) == 0)
        self.peers = Peers(**args["peers"], host=args["host"])
        self.giver = transfer.Giver(self.peers, self.device)
        self.commands = Commands(channel)
        self.validator = Validator(job, coord, args.get("validation", ()), channel.send)
        self.groups: Groups | None = None
        self.engine: Engine | None = None
        self.dealt: Deal | None = None  # of every step of this generation
        self.redo: Deal | None = None  # of its first, if gradients were kept
        self.source: Batches | None = None
        self.saver: Saver | None = None
        self.result: StepResult | None = None  # of the step that was voted for and is not applied yet
        self.report: dict[str, Any] = {}  # of that
        self.record: Record | None = None  # of that, for the ledger
        self.timed: Timed | None = None  # the last step
        self.tracer = Tracer(self.rank, channel.send)
        self.told_facts = False

    def _move(self) -> None:
        """Show progress while the worker starts or restores."""
        self.channel.progress.mark(self._quiet)

    # -- messages from the node

    def serve(self) -> None:
        self._quiet = Phase.idle
        self.channel.send({"type": "up", "port": self.giver.port})
        while (message := self.commands.next()) is not None:
            kind = message["type"]
            if kind == "leave":
                self._end()
                return
            getattr(self, "_on_" + kind)(message)

    def _on_build(self, message: dict[str, Any]) -> None:
        m, world = self.member, int(message["world"])
        if not m.build(world):
            if world == m.world:
                self._say()
            return
        self.commands.world = world
        self.channel.progress.mark(Phase.idle)
        try:
            self._build(world, message["store"])
        except Exception as error:
            self._leave_by(error)
        else:
            m.built()
            self._say()

    def _on_form(self, form: dict[str, Any]) -> None:
        source = Source(**form["source"]) if form["source"] else None
        generation, m = int(form["generation"]), self.member
        if not m.form(generation, int(form["world"]), source):
            if generation == m.generation:
                self._say()
            return
        self.channel.progress.mark(Phase.idle)
        self.commands.generation, entered = generation, True
        try:
            self._enter(form, source)
        except Exception as error:
            entered = False
            if not self._is_out(error, generation):
                return
        self._agree_to_enter(generation, entered)

    def _is_out(self, error: Exception, generation: int) -> bool:
        """Report why the generation could not be entered, unless others are the cause. False: the world is gone too."""
        m = self.member
        if self.commands.halted >= m.world:
            self._leave_by(error)
            return False
        if isinstance(error, UserError) or not (isinstance(error, SOURCE_ERRORS) or survivable(error)):
            raise error
        text = f"{type(error).__name__}: {error}"[:500]
        print(f"generation {generation} was not entered: {text}", flush=True)
        traceback.clear_frames(error.__traceback__)  # they hold groups, and so their sockets
        groups = not isinstance(error, SOURCE_ERRORS)
        takes = not groups and m.step < 0  # only the source can be the cause, even if it refuses a connection
        if self.commands.parting < generation and (takes or not is_echo(type(error).__name__, str(error))):
            m.lack(text, damaged=isinstance(error, BadCheckpoint), groups=groups)
            self._say()
        return True

    def _agree_to_enter(self, generation: int, entered: bool) -> None:
        """Enter with all ranks of the replica, or with none."""
        m = self.member
        assert self.groups
        try:
            said, *held, last = self.groups.agree(self._numbers(entered, m.step, m.prepared, m.made, -m.made))
        except Exception as error:
            self._leave_by(error)
            return
        if not said:
            self._depart(generation, in_common(held[0], held[1], held[2], -last))
        elif m.formed(self.state.step):
            self._say()
            self._run()
        else:
            self._shut_door()
            self._say()

    def _numbers(self, *values: int) -> torch.Tensor:
        return torch.tensor([int(value) for value in values], dtype=torch.int64, device=self.device.torch)

    def _depart(self, generation: int, held: tuple[int, int, int], kept: bool = False) -> None:
        """Leave the generation with the whole replica. Its world stays."""
        self._shut_door()
        if self.member.part(generation, held, kept):
            self.channel.progress.mark(Phase.idle)
            print(f"generation {generation} ended at step {self.member.step}: other replicas were lost", flush=True)
            self._say()

    def _shut_door(self) -> None:
        """Close the groups with other replicas, so that peers that wait there for this rank fail at once."""
        self.giver.withdraw()
        self.commands.door = None
        if self.engine and (link := self.engine.reducer.link):
            link.cross.close()

    def _leave_by(self, error: Exception) -> None:
        """Leave the world after an error inside the replica. After a halt any error is a consequence of it. Otherwise
        the process survives errors of groups; all others are its own, and end it."""
        m, halted = self.member, self.commands.halted >= self.member.world
        if not (halted or survivable(error)):
            raise error
        m.halt(m.world, None if halted else why(error, self.channel.progress.read()))
        self.channel.progress.mark(Phase.idle)
        print(f"world {m.world} ended at step {m.step}: {type(error).__name__}: {error}", flush=True)
        if m.why and "kind" in m.why:
            traceback.print_exception(error)
        traceback.clear_frames(error.__traceback__)  # they hold groups, and so their sockets
        self._leave_world()
        self._say()

    def _say(self) -> None:
        """Send where this worker stands."""
        if said := self.member.standing():
            self.channel.send(said)

    def _on_serve(self, message: dict[str, Any]) -> None:
        """Offer the state to a worker that enters the next generation, in which this one has no place."""
        generation, step = int(message["generation"]), int(message["step"])
        if not self.member.may_serve(generation):
            return
        with contextlib.suppress(ValueError):
            self._settle(step)
            self.giver.offer(generation, step, self.state)

    def _on_part(self, message: dict[str, Any]) -> None:
        """Leave the generation while waiting. (In a step, the command thread has ended the waits for others.)"""
        m, generation = self.member, int(message["generation"])
        if m.phase == "built" and generation > m.generation:  # its peers in the replica may know of that one
            m.generation = generation
            self._agree_to_enter(generation, False)
        elif m.phase == "built":
            self._say()

    def _on_halt(self, message: dict[str, Any]) -> None:
        if self.member.halt(int(message["world"])):
            self._leave_world()
            self._say()

    def _on_save(self, message: dict[str, Any]) -> None:
        m, step = self.member, int(message["step"])
        if m.phase != "built" or m.parted != int(message["generation"]):
            return
        with contextlib.suppress(ValueError):
            self._settle(step)
            if self.saver:
                self.saver.save(step)

    # -- a generation

    def _build(self, world: int, store: str) -> None:
        """Build the groups and the engine of the replica, which last until something breaks in it."""
        self._leave_world()
        layout, coord = self.job.layout, self.job.layout.coord(self.rank)
        with contextlib.closing(MeetingStore(store, (f"replica {coord.replica}", world))) as meeting:
            self._choose_rail("world", meeting, "rails", layout.inside(coord), layout.replica_size)
            self.groups = Groups.form(
                meeting, world, layout, coord, self.device, bool(self.family.experts), self.job.collectives
            )
        self._make_engine()

    def _choose_rail(self, groups: str, store: Any, scope: str, me: int, size: int) -> None:
        """Agree with the other members of the groups on a network that all of them have, the preferred first."""
        if len(self.args["rails"]) > 1:
            interface = rails.choose(self.args["rails"], dist.PrefixStore(scope, store), me, size)
            self.commands.interfaces[groups] = interface

    def _make_engine(self) -> None:
        assert self.groups
        coord, mark = self.job.layout.coord(self.rank), self.channel.progress.mark
        self.engine = Engine(self.job, self.family, coord, self.groups, self.state, self.device, mark=mark)
        self.engine.span = self.tracer.span
        if not self.told_facts:
            self.told_facts = True
            self.channel.send({"type": "facts", **_facts(self.job, self.engine, self.device)})

    def _enter(self, form: dict[str, Any], source: Source | None) -> None:
        """Get the state of the generation's first step, and form its groups."""
        generation, step = int(form["generation"]), int(form["step"])
        replicas, layout = [int(r) for r in form["replicas"]], self.job.layout
        coord, kept = layout.coord(self.rank), [int(r) for r in form["kept"]]
        saved, place = self._as_saved(replicas, coord)
        assert self.groups and self.engine
        if source is None and self.member.step >= 0:
            self._settle(step, keep=coord.replica in kept)
        door = self.commands.door = Door()
        if self.commands.parting >= generation:
            raise StepFailed("the generation was over before it was entered")
        began = time.perf_counter()
        if source and source.kind == "live":
            self._wait_for_snapshot()
            transfer.take(self.peers, _address(source.address), generation, step, self.state, self.device, self._move)
        else:
            self._restore(saved, place, source, step)
        if form["gives"]:
            self.giver.offer(generation, step, self.state)
        self.member.restored(step)
        restored = time.perf_counter()
        cross = door.form(lambda: self._form_cross(form["store"], generation, coord, replicas))
        self.engine.rejoin(cross)
        if form["joins"] and cross:
            self._compare(replicas, source is None)
        self._deal(replicas, kept)
        try:
            self._keep_line(saved, place, generation)
        except UserError as error:
            if source and source.kind == "start":
                raise
            raise RuntimeError(str(error)) from None  # it was possible when the run began, and may be again
        took = {"restore_s": restored - began, "form_s": time.perf_counter() - restored}
        from_ = source.kind if source else "kept"
        self.channel.send({"type": "entered", "generation": generation, "source": from_, **took})

    def _form_cross(self, store: str, generation: int, coord: Coord, replicas: list[int]) -> Cross | None:
        """Form the groups with other replicas, in a thread of their own: the store has a connection per thread."""
        self.device.use()
        layout = self.job.layout
        with contextlib.closing(MeetingStore(store, ("gang", generation))) as meeting:
            if len(replicas) > 1:
                scope = f"rails{layout.inside(coord)}"
                self._choose_rail("cross", meeting, scope, replicas.index(coord.replica), len(replicas))
            return form_cross(meeting, generation, layout, coord, self.device, self.job.collectives, replicas)

    def _compare(self, replicas: list[int], kept: bool) -> None:
        """Compare the state with that of the other replicas. The majority is right; in a tie, those that kept what they
        had. A rank that is wrong ends."""
        assert self.engine and self.engine.reducer.link
        link = self.engine.reducer.link
        me, mine = replicas.index(self.job.layout.coord(self.rank).replica), transfer.digest_of(self.state)
        said = self._numbers(*[0] * (2 * len(replicas)))
        said[2 * me], said[2 * me + 1] = int(mine[:15], 16), int(kept)
        if not link.does(lambda: link.cross.sum_(said)):
            raise StepFailed("other replicas were lost before states were compared")
        digests, keeps = said.tolist()[::2], said.tolist()[1::2]
        votes = {d: (digests.count(d), sum(k for e, k in zip(digests, keeps, strict=True) if e == d)) for d in digests}
        right = max(votes, key=lambda d: (*votes[d], d))
        if digests[me] != right:
            raise AssertionError("has another state than its peers")

    def _deal(self, replicas: list[int], kept: list[int]) -> None:
        """Divide the same batch among the replicas that are present; of the first step, only what nobody has."""
        before = self.redo or self.dealt
        held = {r: before.whole(r) for r in kept} if before and kept else None
        self.redo = deal(self.job, replicas, held) if held else None
        self.dealt = deal(self.job, replicas)
        address, peers = self.args["data"]["address"], self._peers(replicas)
        if self.source:
            self.source.close()
        self.source = Batches(self.job, lambda indices, step: Feed(address, indices, step, peers), self.facts)
        self.source.prepare(self.state.step, self._indices(self.redo or self.dealt))

    def _as_saved(self, replicas: list[int], coord: Coord) -> tuple[Job, Coord]:
        """Return the job and the coordinate as checkpoints see them: only replicas that are present count, since they
        divide the work of writing."""
        layout = dataclasses.replace(self.job.layout, replica=len(replicas))
        place = dataclasses.replace(coord, replica=replicas.index(coord.replica))
        return dataclasses.replace(self.job, layout=layout), place

    def _indices(self, dealt: Deal) -> list[int]:
        """Return the micro-batches of a step that this rank is to compute."""
        coord = self.job.layout.coord(self.rank)
        return self.job.micro_indices(coord, dealt.todo[coord.replica])

    def _settle(self, step: int, keep: bool = False) -> None:
        """Apply the step that was voted for if it counts; else it never happened. ValueError: this worker lacks `step`.
        `keep`: what was computed of the next one stays."""
        prepared = self.result
        if self.member.settle(step):
            assert prepared is not None
            self._wait_for_snapshot()
            if self.engine:
                self.engine.update(prepared)
            else:
                apply(self.job, self.state, prepared)
            self._enter_ledger()
            self.channel.send(self.report)
        if self.engine and not keep:
            self.engine.drop()
        self.result = None

    def _restore(self, job: Job, coord: Coord, source: Source | None, step: int) -> None:
        if source is None:
            return
        self._wait_for_snapshot()
        if source.kind == "memory":
            self._drop_saver()
            slot, made = fetch(self.peers, _address(source.address), source.number, (step, source.made))
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
            if self.engine:
                self.engine.close()
                self._make_engine()
        self.state.ledger = self.args["ledger"] or GENESIS
        torch.manual_seed(self.job.seed)

    def _peers(self, replicas: list[int]) -> int:
        """Count the ranks of this node that work on the same micro-batches, this one included."""
        layout, own = self.job.layout, self.job.layout.coord(self.rank)
        here = range(layout.world_size)
        if self.local_ranks < layout.world_size:
            here = range(
                layout.node(self.rank) * layout.ranks_per_node, (layout.node(self.rank) + 1) * layout.ranks_per_node
            )
        coords = [layout.coord(rank) for rank in here if rank < layout.world_size]
        return sum((c.replica, c.shard) == (own.replica, own.shard) for c in coords if c.replica in replicas)

    def _keep_line(self, job: Job, coord: Coord, generation: int) -> None:
        """Open a line to the keeper of checkpoints; a new one when the rank writes other parts of the state than
        before."""
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

    def _leave_world(self) -> None:
        self.giver.withdraw()
        self.commands.door = None
        if self.source:
            self.source.close()
        if self.engine:
            self.engine.close()
        if self.groups:
            self.groups.close()
        self.source = self.engine = self.groups = self.redo = None
        self.commands.left = self.member.world if self.member.phase == "parked" else self.commands.left

    # -- steps

    def _run(self) -> None:
        m = self.member
        try:
            self.giver.withdraw()
            while m.phase == "running":
                step = self.state.step
                self.tracer.begin(step, self.commands.profile)
                with self.tracer.span(f"step {step}"):
                    self._step()
                if self.state.step > step:
                    self.tracer.end(step)
        except Exception as error:
            self._leave_by(error)

    def _step(self) -> None:
        m, state, channel, engine = self.member, self.state, self.channel, self.engine
        dealt = self.redo or self.dealt
        assert engine and self.source and self.groups and dealt
        self._validate()
        began, step = time.perf_counter(), state.step
        channel.progress.mark(Phase.loading, step=step)
        with self.tracer.span("data"):
            batches, fed = self.source.take(step, self._indices(dealt))
        try:
            with self.commands.interruptible():
                begin = self.device.moment()
                result = engine.gradients(batches, dealt)
                reduced = self.device.moment()
            self.report = self._tell_of(step, result, fed) | self._phases()
            self.report["time_s"] = time.perf_counter() - began  # in case its commit is only known when all have parted
        except StepFailed:  # on all ranks of the replica
            self._depart_with(dealt)
            return
        may = not channel.progress.lease_ended and self.commands.parting < m.generation
        wants_pause, version = False, self.commands.interval[0]
        if may:
            self.result = result
            m.ask_pause(self.commands.pausing)
            wants_pause = m.vote()
        with self.tracer.span(VOTE):
            seen = self._total(self._numbers(may, wants_pause, version, version**2))
        if seen is None or seen[0] < len(dealt.replicas) * self.job.layout.replica_size:
            self._depart_with(dealt)
            return
        votes, pauses, total, squares = seen
        channel.progress.mark(Phase.optimizer)
        voted = time.perf_counter()
        if self.saver:
            with self.tracer.span("checkpoint"):
                self.report |= self.saver.before_update()
        saved_s, updating = time.perf_counter() - voted, self.device.moment()
        with self.tracer.span("optimizer"):
            engine.update(result)
        updated = self.device.moment()
        self._enter_ledger()
        self.result = self.redo = None
        go_on = m.commit(pauses > 0)
        applied = time.perf_counter()
        if self.saver:
            with self.tracer.span("checkpoint"):
                self.saver.after_update(result.grad_norm, known=total**2 == votes * squares)
        saved_s += time.perf_counter() - applied
        marks = (begin, result.passed, reduced, updating, updated)
        self.timed = Timed(step, fed["data_wait_s"], result.passes, marks, saved_s)
        self.report["time_s"] = time.perf_counter() - began
        if state.step >= self.job.train.steps:
            self._validate()  # before anybody knows that the last step is done: the run may end then
        channel.send(self.report)
        if not go_on:
            channel.progress.mark(Phase.idle)
            self._shut_door()
            self.groups.agree(self._numbers(0))  # all ranks of the replica have applied it
            self._say()

    def _validate(self) -> None:
        """Validate if it is due. This ends early when the generation does, or is to; the next one then begins it
        again."""
        m, step = self.member, self.state.step
        if not self.validator.is_due(step):
            return
        assert self.engine and self.groups and self.dealt
        groups = self.groups

        def may_go_on() -> bool:
            over = max(self.commands.parting, self.commands.pausing) >= m.generation
            return bool(groups.agree(self._numbers(not over))[0])

        said = self.validator.run(self.engine, self.dealt.replicas, may_go_on)
        if said:
            self.channel.send({"type": "validation", "step": step, "generation": m.generation, **said})

    def _depart_with(self, dealt: Deal) -> None:
        """Leave the generation. The gradients are kept if all that was dealt to the replica is in them."""
        m = self.member
        assert self.groups and self.engine
        self._shut_door()
        kept = bool(self.engine.held) and self.engine.held == dealt.whole(self.engine.coord.replica)
        step, prepared, made, keeps = self.groups.agree(self._numbers(m.step, m.prepared, m.made, kept))
        self._depart(m.generation, (step, prepared, made), bool(keeps))

    def _total(self, values: torch.Tensor) -> list[int] | None:
        """Sum over all ranks; None: other replicas are lost."""
        assert self.groups and self.engine
        link = self.engine.reducer.link
        return self.groups.total(values, link.does if link else lambda work: True)

    def _phases(self) -> dict[str, Any]:
        """Return the seconds of the last step's phases. This step's are not over on the device, and nobody is to
        wait."""
        last, self.timed = self.timed, None
        if last is None or last.step != self.state.step - 1:
            return {}
        return {"phases": last.phases(self.device.seconds_between)}

    def _enter_ledger(self) -> None:
        """Add the step that was just applied to the chain of those before it."""
        assert self.record
        record = dataclasses.replace(self.record, previous=self.state.ledger)
        self.state.ledger = record.hash()
        if self.report["whole"]:
            self.report["whole"]["record"] = record.to_line()

    def _tell_of(self, step: int, result: StepResult, fed: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the step. All ranks exchange their losses, each bit pattern in a place of its own, so
        that any rank that is left of the gang can report the whole of a step that counts."""
        engine = self.engine
        assert engine
        job, coord = engine.job, engine.coord
        cp, mine = job.layout.cp, torch.zeros(1 + job.num_micro * job.layout.cp, dtype=torch.int64)
        mine = mine.to(self.device.torch)
        if not (coord.tp or coord.cp or coord.pp):  # its peers have had the same samples
            mine[0] = _signed(int(fed["data_digest"], 16))
        if coord.tp == 0 and result.loss_sums.numel():  # tp peers have the same losses; cp ranks parts of them
            places = torch.tensor([1 + i * cp + coord.cp for i in result.indices], device=self.device.torch)
            mine[places] = result.loss_sums.to(torch.float64).view(torch.int64)
        if (told := self._total(mine)) is None:
            raise StepFailed("other replicas were lost before the losses were exchanged")
        digest, *words = told
        losses = [float(x) for x in torch.tensor(words, dtype=torch.int64).view(torch.float64).tolist()]
        norm, tokens, batch = float(result.grad_norm), int(result.tokens), job.train.global_batch
        whole: dict[str, Any] = {
            "loss_sums": losses,
            "tokens": tokens,
            "data_digest": f"{digest % (1 << 64):016x}",
        }
        result.loss = mean_loss(losses, tokens)
        result.skip = why_skip(job.train, self.state.recent, result.loss, norm)
        if result.skip:
            whole["skipped"] = self._skipped(step, result.skip, losses)
        self.record = Record(
            step=step,
            previous="",
            samples=(self.facts.cursor(step, batch), self.facts.cursor(step + 1, batch)),
            data_version=self.facts.data_version,
            loss_bits=bits(result.loss),
            norm_bits=bits(norm),
            layout=self.job.to_dict()["layout"],
            generation=self.member.generation,
            rng="",
            skipped=result.skip,
        )
        speaks = job.layout.inside(coord) == 0  # reports for its replica
        return {
            "type": "step",
            "step": step,
            "rank": self.rank,
            "generation": self.member.generation,
            "grad_norm": norm,
            "lr": result.lr,
            "data_wait_s": fed["data_wait_s"],
            "data_ready": fed["data_ready"],
            "served": fed["served"] if not (coord.tp or coord.cp or coord.pp) else {},
            "experts": _balance(result.loads) if not (coord.tp or coord.cp or coord.shard) else {},
            "whole": whole if speaks else None,
        }

    def _skipped(self, step: int, reason: str, losses: list[float]) -> dict[str, Any]:
        """Return the report of a step that is not applied: why, and the places of the suspected samples."""
        train, layout = self.job.train, self.job.layout
        if in_a_row(self.state.recent) >= train.max_skips:
            raise FloatingPointError(
                f"step {step}: {reason}; train.max_skips = {train.max_skips} steps in a row may be skipped; "
                "lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the samples of this step "
                f"(`phalanx data where --step {step}`)"
            )
        first, size = self.facts.cursor(step, train.global_batch), train.micro_batch
        bad = suspects(losses, layout.cp)[:8]
        return {"reason": reason, "places": [[first + i * size, first + (i + 1) * size] for i in bad]}

    def _end(self) -> None:
        self.channel.progress.mark(Phase.done)
        self._drop_saver()
        memory = self.device.peak_memory_bytes()
        self.channel.send(
            {"type": "done", "digest": self.state.digest(), "step": self.state.step, "memory_bytes": memory}
        )
        self._leave_world()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def num_threads(job: Job, local_ranks: int) -> int:
    """Return the CPU threads of a rank. A matrix product's last bits depend on them, so the exact reduction does not
    let them follow the number of ranks."""
    if job.run.threads or job.train.reduction == "exact":
        return job.run.threads or 1
    return max(1, num_cores() // local_ranks)


def survivable(error: Exception) -> bool:
    """Return whether the process and its state are sound after it: torch raises such errors when members of a group are
    gone or cannot meet. Gloo raises a bare RuntimeError, so one of the model's own counts too: it will come again, and
    end the run."""
    return type(error) in (RuntimeError, StepFailed, Halted) or isinstance(error, dist.DistError)


def why(error: Exception, at: Reading) -> dict[str, Any]:
    """Return the report of an error that ended the generation. All ranks report lost peers in the same words, so that
    their reports can be merged."""
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


def _balance(loads: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Find the layer that spreads its tokens least evenly: its busiest expert's load over the mean, and how many of its
    experts had none."""
    if not loads:
        return {}
    load_LE = torch.stack(list(loads.values())).double()
    over_L, idle_L = load_LE.amax(1) / load_LE.mean(1).clamp_min(1e-9), (load_LE == 0).sum(1)
    worst, layer, idle = max(zip(over_L.tolist(), loads, idle_L.tolist(), strict=True))
    return {"load": worst, "layer": layer, "idle": idle}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
