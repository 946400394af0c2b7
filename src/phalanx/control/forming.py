"""The next generation: which replicas take part, from which step they continue, where those that lack it get it, and
the Form that announces it. This file decides whether to wait for more replicas, but not what a failed attempt means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.control.desk import Desk
from phalanx.control.finding import Finder
from phalanx.control.generation import Generation
from phalanx.control.membership import Membership
from phalanx.control.messages import EVERYONE, Form, Gift, Source
from phalanx.control.policy import Policy
from phalanx.control.sources import Lineage
from phalanx.control.staffing import Staff
from phalanx.control.worlds import Worlds
from phalanx.core.checkpoint import buddies

MOST_REASONS = 16  # in a Form: every node is told
Sources = dict[int, Source]  # by rank that lacks the step
Gifts = dict[int, Gift]  # by replica that does


@dataclass
class Forming:
    patience_ns: int = -1  # when to stop waiting for full strength
    retry_ns: int = 0  # no Form before this

    def bind(
        self,
        desk: Desk,
        members: Membership,
        policy: Policy,
        staff: Staff,
        worlds: Worlds,
        gen: Generation,
        lineage: Lineage,
        finder: Finder,
    ) -> None:
        self._desk, self._members, self._policy, self._staff = desk, members, policy, staff
        self._worlds, self._gen, self._lineage, self._finder = worlds, gen, lineage, finder

    def be_patient(self, for_ns: int) -> None:
        self.patience_ns = self._desk.now_ns + for_ns
        if for_ns:
            self._desk.set("wait", for_ns)

    def hold_back(self, for_ns: int) -> None:
        self.retry_ns = self._desk.now_ns + for_ns
        if for_ns:
            self._desk.look_after(for_ns)

    # -- who takes part

    @property
    def waits(self) -> bool:
        """Return whether replicas are missing that are still waited for."""
        missing = len(self._worlds.built) < len(self._members.wanted)
        return missing and self._desk.now_ns < self.patience_ns and not self._staff.leaving

    def gather(self) -> Form | list[int]:
        """Form the next generation, if possible. Nodes may have to be asked first what they hold. Before a step is
        given up, return the replicas whose worlds must be halted: only their workers know what they hold."""
        lineage, finder = self._lineage, self._finder
        has = self._worlds.up_to_date(lineage)
        chosen = self._choose(has)
        if not chosen:
            return []
        standing = [r for r in chosen if r in has]
        if standing and (found := self._around(chosen, standing)):
            chosen, gifts, kept = found
            return self._form(chosen, lineage.committed, {}, gifts, kept)
        if self._worlds.among(self._worlds.astir, "leaving"):
            return []  # they may hold what is looked for
        crew = {rank: worker for r in chosen for rank, worker in self._worlds.replicas[r].crew.items()}
        step, sources = finder.newest(crew, lineage.committed if lineage.certain else None)
        live = all(source.kind == "live" for source in sources.values())
        if self._gen.begun and not finder.asked and not (live and step == lineage.committed and lineage.certain):
            self._desk.phase = "asking"
            finder.ask(self._gen.number)
            return []
        if not (lineage.certain and step == lineage.committed) and (unsaid := self._worlds.unsaid()):
            return unsaid
        return self._form(chosen, step, sources)

    def _choose(self, has: set[int]) -> list[int]:
        """Choose the replicas that take part; []: too few can, or more are waited for. `has`: those that are up to
        date. Leave out replicas that have failed lately while the others can do without them."""
        members, staff, worlds, now_ns = self._members, self._staff, self._worlds, self._desk.now_ns
        built = worlds.built & members.down.keys()
        late = {r for r in worlds.failing & built if now_ns < worlds.replicas[r].again_ns}
        late -= has - late or has or built  # these are kept in any case
        if len(built) - len(late) < self._policy.min_replicas <= len(built):
            late = set()
        chosen = sorted(built - late)
        if late:
            self._desk.look_after(min(worlds.replicas[r].again_ns for r in late) - now_ns)
        full = len(members.wanted)
        for name in sorted(staff.leaving):
            if staff.can_let_go(name, chosen):
                there = members.replicas_at(members.nodes[name].place)
                chosen = [replica for replica in chosen if replica not in there]
                full -= len(there)
        if now_ns < self.retry_ns:
            self._desk.look_after(self.retry_ns - now_ns)
            return []
        if len(chosen) < full and now_ns < self.patience_ns:
            return []
        least = self._policy.min_replicas
        if len(chosen) < least:
            vacant = f"; {len(members.vacant)} places have no node" if members.vacant else ""
            if members.vacant or not (worlds.astir or staff.is_hopeful):
                self._desk.hold(f"{len(chosen)} replicas are whole, and {least} must be{vacant}")
            return []
        return chosen

    def _around(self, chosen: list[int], standing: list[int]) -> tuple[list[int], Gifts, tuple[int, ...]] | None:
        """Continue with the replicas that stand; the others join them, and take the state of one of them. Nobody joins
        while a step is redone whose gradients are kept, unless the job waits for full strength. None: too few can take
        part."""
        gifts: Gifts = {}
        kept = self._keeping(standing)
        if kept and len(standing) >= self._policy.min_replicas and not self._policy.wait_ns:
            chosen = standing
        for number in sorted({*chosen}.difference(standing)):
            given = self._finder.from_peer(number, standing)
            if given is None:
                chosen = [r for r in chosen if r != number]
            else:
                gifts[number] = given
        if len(chosen) < self._policy.min_replicas:
            return None
        if gifts:
            self._staff.why.append((-1, f"replicas {sorted({*chosen}.difference(standing))} join"))
        return chosen, gifts, () if gifts else kept

    def _keeping(self, standing: list[int]) -> tuple[int, ...]:
        """Return the replicas that keep the gradients of their share of the next step; none, unless all that stand know
        how that step was dealt."""
        replicas, number, committed = self._worlds.replicas, self._gen.number, self._lineage.committed
        for found in map(replicas.__getitem__, standing):
            if found.parted != number or found.copy is None or found.copy.step != committed:
                return ()
        return tuple([r for r in standing if replicas[r].kept])

    # -- what they are told

    def _form(
        self, chosen: list[int], step: int, sources: Sources, gifts: Gifts | None = None, kept: tuple[int, ...] = ()
    ) -> Form:
        """Build a Form, and move the lineage to its step. `kept`: replicas that keep gradients of the next step."""
        staff, replicas, lineage, wanted = self._staff, self._worlds.replicas, self._lineage, self._members.wanted
        number, last = self._gen.number + 1, max(step, lineage.committed)
        if self._gen.begun and any(source.kind in ("durable", "start") for source in sources.values()):
            staff.why.append((4, f"step {step} is in a checkpoint only"))
        if len(chosen) < len(wanted):
            staff.why.append((-1, f"replicas {sorted({*wanted}.difference(chosen))} are left out"))
        branch = lineage.resume(number, step)
        if branch:
            staff.why.append((-1, f"back to step {step}: no later one is left of every rank"))
        every = self._every(chosen, sources)
        return Form(
            generation=number,
            step=step,
            replicas=tuple(chosen),
            worlds=tuple([replicas[r].world for r in chosen]),
            every=every,
            sources={} if every else sources,
            takers={} if every else self._homes(sources),
            kept=kept,
            buddies=self._buddies(chosen),
            branch=branch,
            last=last,
            rung=max((rung for rung, _ in staff.why), default=-1),
            reason=self._reason(),
            nodes=EVERYONE,
            joins=bool(sources or gifts) and not every,
            gifts=gifts or {},
        )

    def _every(self, chosen: list[int], sources: Sources) -> Source | None:
        """Return the source that all ranks share, if it is a checkpoint or the start of the run."""
        every = next(iter(sources.values()), None)
        if every is None or every.kind not in ("durable", "start"):
            return None
        ranks = sum(len(self._worlds.replicas[r].crew) for r in chosen)
        return every if len(sources) == ranks and all(source == every for source in sources.values()) else None

    def _homes(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the node of each rank."""
        size, worlds, wanted = self._members.replica_size, self._worlds, {*ranks}
        homes: dict[int, str] = {}
        for replica in sorted({rank // size for rank in wanted}):
            homes.update(zip(worlds.replicas[replica].crew, worlds.homes(replica), strict=True))
        return homes if len(homes) == len(wanted) else {rank: homes[rank] for rank in sorted(wanted)}

    def _buddies(self, replicas: list[int]) -> dict[str, str]:
        """Pair each node with another that keeps a copy of its snapshots, or with a spare if there is no other."""
        if not self._policy.buddies:
            return {}
        nodes, names = self._members.nodes, sorted(self._worlds.nodes(replicas))
        there = names if len(names) > 1 else sorted([*names, *self._members.spares])
        pairs = zip(there, buddies([nodes[name].domain for name in there]), strict=True)
        return {name: nodes[there[at]].memory for name, at in pairs if at is not None and name in names}

    def _reason(self) -> str:
        texts = [text for _, text in self._staff.why[:MOST_REASONS]]
        more = len(self._staff.why) - len(texts)
        return "; ".join(texts + [f"and {more} more"] * bool(more)) or "all are there"
