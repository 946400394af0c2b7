"""The judge of a simulation. It sees what every worker really does, knows nothing of how control decides, and raises on
anything that must not happen."""

from __future__ import annotations

from hashlib import blake2b

BATCH = 12  # samples in a step; divides into 1, 2, 3 and 4 shares


class Violation(AssertionError):
    pass


def must(true, text, *args):
    if not true:
        raise Violation(text.format(*args))


def advanced(state, step, attempt):
    """Return the state after one more step. A step that is redone in another generation gives another state, as with
    the fast reduction, so that nobody can mix the two unnoticed."""
    return blake2b(f"{state}/{step}/{attempt}".encode(), digest_size=8).hexdigest()


def initial(coordinate):
    return f"seed-{coordinate}"


class Slot:
    """The account of one rank's time. Running time is recorded twice, by the clock and by the attempts, and both must
    agree; whether an attempt was productive is known at the end."""

    def __init__(self):
        self.owner, self.kind, self.since = 0, "idle", 0
        self.spent = dict(idle=0, stalled=0, running=0)
        self.attempts = []  # (step, generation, time)
        self.open_ns = 0

    def turn(self, kind, now):
        self.spent[self.kind] += now - self.since
        self.kind, self.since = kind, now


class Ledger:
    def __init__(self, size, ranks):
        self.size = size  # of a replica
        self.history = {}  # step -> generation in which its gradients were made
        self.states = {}  # (coordinate, step) -> state
        self.slots = {rank: Slot() for rank in range(ranks)}
        self.forms = {}
        self.homes = {}  # generation -> the nodes of the ranks that take part, in order
        self.in_slot = {}  # (generation, rank) -> worker
        self.starts = {}  # generation -> when its first worker began
        self.undone = 0
        self.shares = {}  # (generation, replica, step) -> the result of `share`

    # -- steps

    def share(self, generation, replica, step):
        """Return the samples that an active replica takes, and those whose gradients it has already. Shares are equal.
        If some replicas kept theirs, they reuse these in the first step of a generation, and only the missing samples
        are dealt."""
        about = generation, replica, step
        if about not in self.shares:
            self.shares[about] = self._share(*about)
        return self.shares[about]

    def _share(self, generation, replica, step):
        form = self.forms[generation]
        index, count = form.replicas.index(replica), len(form.replicas)
        if step > form.step + 1 or not form.kept:
            return tuple(range(index * BATCH // count, (index + 1) * BATCH // count)), ()
        held = {r: self.share(generation - 1, r, step)[0] for r in form.kept}
        missing, own = sorted(set(range(BATCH)).difference(*held.values())), held.get(replica, ())
        return tuple(sorted([*own, *missing[index::count]])), own

    def reduced(self, coordinate, samples):
        """Check the samples that went into the gradients of a coordinate."""
        must(sorted(samples) == list(range(BATCH)), "coordinate {} was trained on {}", coordinate, sorted(samples))

    def applied(self, rank, step, attempt, before, after, voted_ns=0):
        if self.abandoned(step, attempt):  # the worker was given up and does not know it
            later = [at for generation, at in self.starts.items() if generation > attempt]
            must(all(voted_ns <= at for at in later), "generation {} goes on after it was replaced", attempt)
            return
        known = self.history.setdefault(step, attempt)
        must(known == attempt, "step {} was committed in generation {}, and again in {}", step, known, attempt)
        must(step == 1 or step - 1 in self.history, "step {} was committed without the one before it", step)
        coordinate = rank % self.size
        for at, state in ((step - 1, before), (step, after)):
            equal = self.states.setdefault((coordinate, at), state)
            must(equal == state, "rank {} has another state than its peers at step {}", rank, at)

    def abandoned(self, step, attempt):
        return any(f.branch and f.generation > attempt and step > f.step for f in self.forms.values())

    # -- membership

    def formed(self, form, homes):
        self.forms[form.generation], self.homes[form.generation] = form, homes
        must(form.generation == len(self.forms), "generation {} after {}", form.generation, len(self.forms) - 1)
        later = [step for step in self.history if step > form.step]
        must(form.branch or not later, "steps {} were committed and are silently undone", later)
        for step in later:
            del self.history[step]
            self.undone += 1
        self.states = {key: state for key, state in self.states.items() if key[1] <= form.step}

    def started(self, generation, rank, worker, now=0):
        self.starts.setdefault(generation, now)
        other = self.in_slot.setdefault((generation, rank), worker)
        must(other == worker, "workers {} and {} are both rank {} of generation {}", other, worker, rank, generation)

    # -- time

    def owns(self, rank, worker, now):
        """Give a slot to a worker: its time counts for the slot from now on."""
        slot = self.slots[rank]
        if slot.owner != worker:
            self._cut(slot, now)
            slot.owner = worker
            slot.turn("stalled" if worker else "idle", now)

    def clock(self, rank, worker, kind, now):
        slot = self.slots[rank]
        if slot.owner == worker:
            if kind != "running":
                self._cut(slot, now)
            slot.turn(kind, now)
            if kind == "idle":
                slot.owner = 0

    def begin(self, rank, worker, step, generation, now):
        slot = self.slots[rank]
        if slot.owner == worker:
            self._cut(slot, now)
            slot.open_ns = now
            slot.attempts.append([step, generation, 0])

    def _cut(self, slot, now):
        if slot.open_ns:
            slot.attempts[-1][2], slot.open_ns = now - slot.open_ns, 0

    def accounts(self, now):
        """Return productive, stalled, lost and idle time per slot, and check that they add up to all the time there
        was."""
        out = []
        for slot in self.slots.values():
            self._cut(slot, now)
            slot.turn("idle", now)
            productive = sum(t for step, attempt, t in slot.attempts if self.history.get(step) == attempt)
            lost = sum(t for step, attempt, t in slot.attempts if self.history.get(step) != attempt)
            total = productive + slot.spent["stalled"] + lost + slot.spent["idle"]
            must(slot.spent["running"] == productive + lost, "attempts take {} of {}", productive + lost, slot.spent)
            must(total == now, "{} of {} are accounted for", total, now)
            out.append((productive, slot.spent["stalled"], lost, slot.spent["idle"]))
        return out

    def finish(self, steps, now, final):
        """Check that all steps are done, each once, and that what was saved is what they make."""
        must(sorted(self.history) == list(range(1, steps + 1)), "the history is {}", sorted(self.history))
        for coordinate, state in final.items():
            want = initial(coordinate)
            for step in range(1, steps + 1):
                want = advanced(want, step, self.history[step])
            must(state == want, "coordinate {} is saved with another state than was trained", coordinate)
        must(len(final) == self.size, "{} of {} coordinates are saved", len(final), self.size)
        return self.accounts(now)
