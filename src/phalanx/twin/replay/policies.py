"""The classical policies, for comparison: FIFO, EASY and conservative backfilling, shortest job first, shortest
remaining time first, and Tiresias' least attained service in two queues. All but FIFO and Tiresias know how long each
job will take, which is unknown in practice: they are yardsticks.

The driver calls `submit`, `finish` and `decide` on a policy, which starts and stops jobs through its `Room`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from heapq import heappop, heappush, merge
from typing import Protocol

from phalanx.twin.replay.pool import Pool, Taken
from phalanx.twin.replay.trace import Job

S = 10**9


class Room(Protocol):
    """The actions and facts available to a policy. `remaining_ns`: the time that a job still has to run."""

    pool: Pool
    now_ns: int

    def start(self, job: Job, taken: Taken) -> None: ...
    def stop(self, job: Job) -> None: ...
    def remaining_ns(self, job: Job) -> int: ...
    def served_ns(self, job: Job) -> int: ...


class Policy:
    def __init__(self, room: Room):
        self.room = room

    def submit(self, now_ns: int, job: Job) -> None: ...
    def finish(self, now_ns: int, job: Job) -> None: ...
    def decide(self, now_ns: int) -> int:
        """Start and stop jobs. Return when to be asked next even if nothing happens until then; 0: no need."""
        raise NotImplementedError


class Ordered(Policy):
    """Runs jobs strictly in one order: the first that does not fit blocks the others."""

    def __init__(self, room: Room, key: Callable[[Job], int]):
        super().__init__(room)
        self.key, self.waiting = key, list[tuple[int, int, Job]]()

    def submit(self, now_ns: int, job: Job) -> None:
        heappush(self.waiting, (self.key(job), job.number, job))

    def decide(self, now_ns: int) -> int:
        while self.waiting and (taken := self.room.pool.take(self.waiting[0][2].gpus)):
            self.room.start(heappop(self.waiting)[2], taken)
        return 0


def fifo(room: Room) -> Policy:
    return Ordered(room, lambda job: job.number)


def sjf(room: Room) -> Policy:
    return Ordered(room, lambda job: job.duration_ns)


class Backfilling(Policy):
    """FIFO, except that a job may overtake. EASY: it may do so if that does not delay the first job in the queue, whose
    start is computed from the ends of running jobs. Waiting jobs are kept by size, so that sizes without room are
    skipped."""

    def __init__(self, room: Room):
        super().__init__(room)
        self.by_size: dict[int, dict[int, Job]] = {}
        self.shortest: dict[int, list[tuple[int, int]]] = {}  # per size, (duration, number); some have already started
        self.ends: list[tuple[int, int, Taken]] = []  # ends of running jobs, sorted
        self.end_of: dict[int, tuple[int, int, Taken]] = {}

    def submit(self, now_ns: int, job: Job) -> None:
        self.by_size.setdefault(job.gpus, {})[job.number] = job
        heappush(self.shortest.setdefault(job.gpus, []), (job.duration_ns, job.number))

    def finish(self, now_ns: int, job: Job) -> None:
        entry = self.end_of.pop(job.number)
        at = self.ends.index(entry, 0)  # the entry is near the front
        del self.ends[at]

    def first(self) -> Job | None:
        heads = [next(iter(jobs.values())) for jobs in self.by_size.values() if jobs]
        return min(heads, key=lambda job: job.number, default=None)

    def start(self, now_ns: int, job: Job, taken: Taken) -> None:
        del self.by_size[job.gpus][job.number]
        self.room.start(job, taken)
        entry = (now_ns + job.duration_ns, job.number, taken)
        self.end_of[job.number] = entry
        insort(self.ends, entry)

    def decide(self, now_ns: int) -> int:
        pool, head = self.room.pool, self.first()
        while head and (taken := pool.take(head.gpus)):
            self.start(now_ns, head, taken)
            head = self.first()
        if head and pool.total:
            self.overtake(now_ns, head)
        return 0

    def overtake(self, now_ns: int, head: Job) -> None:
        """Start jobs that end before the first one starts, or that leave its reserved GPUs alone: those that it would
        get at the first end that makes room for it."""
        pool, later, start_ns = self.room.pool, self.room.pool.copy(), now_ns
        for end_ns, _, taken in self.ends:
            later.give(taken)
            start_ns = end_ns
            if later.fits(head.gpus):
                break
        reserved = later.take(head.gpus)
        assert reserved, head
        window_ns = start_ns - now_ns
        able = {s for s, jobs in self.by_size.items() if jobs and pool.fits(s)}
        able = {s for s in able if self._least_ns(s) <= window_ns or later.fits(s)}
        hurried = {s for s in able if self._least_ns(s) <= window_ns}  # sizes with a job that ends in time
        blocked = set[int]()  # sizes whose places are reserved, until another job starts
        for job in merge(*(list(self.by_size[s].values()) for s in able), key=lambda job: job.number):
            size, short = job.gpus, job.duration_ns <= window_ns
            if job is head or size not in able or (size in blocked and not short):
                continue
            found = pool.find(size)
            if not found:
                able.discard(size)
            elif short or later.has(found):
                pool.use(found)
                if not short:
                    later.use(found)
                self.start(now_ns, job, found)
                blocked.clear()
            else:
                blocked.add(size)
            if able <= blocked - hurried:
                return

    def _least_ns(self, size: int) -> int:
        """Return the shortest duration of a waiting job of this size."""
        heap, waiting = self.shortest[size], self.by_size[size]
        while heap[0][1] not in waiting:
            heappop(heap)
        return heap[0][0]


class Conservative(Policy):
    """Gives every job its start when it arrives, behind all earlier arrivals; later jobs do not delay it. Starts are
    computed in GPUs only; at its time a job may still have to wait for nodes, because the free GPUs may be
    scattered."""

    def __init__(self, room: Room):
        super().__init__(room)
        self.times, self.free = [0], [room.pool.total]  # free GPUs from each time on
        self.due: list[tuple[int, int, Job]] = []

    def submit(self, now_ns: int, job: Job) -> None:
        at = bisect_right(self.times, now_ns) - 1
        del self.times[:at], self.free[:at]
        begin, first = now_ns, 0
        for i, free in enumerate(self.free):
            if free < job.gpus:
                first = i + 1
            elif i + 1 == len(self.times) or self.times[i + 1] >= max(self.times[first], now_ns) + job.duration_ns:
                break
        begin = max(self.times[first], now_ns)
        self._cut(begin)
        self._cut(begin + job.duration_ns)
        low, high = bisect_left(self.times, begin), bisect_left(self.times, begin + job.duration_ns)
        for i in range(low, high):
            self.free[i] -= job.gpus
        heappush(self.due, (begin, job.number, job))

    def _cut(self, at_ns: int) -> None:
        at = bisect_right(self.times, at_ns)
        if self.times[at - 1] != at_ns:
            self.times.insert(at, at_ns)
            self.free.insert(at, self.free[at - 1])

    def decide(self, now_ns: int) -> int:
        late = []
        while self.due and self.due[0][0] <= now_ns:
            entry = heappop(self.due)
            if taken := self.room.pool.take(entry[2].gpus):
                self.room.start(entry[2], taken)
            else:
                late.append(entry)
        for entry in late:
            heappush(self.due, entry)
        return next((begin for begin, _, _ in self.due[:1] if begin > now_ns), 0)


class Preemptive(Policy):
    """The highest-ranked job runs: lower-ranked ones are stopped for it, if that is enough to let it start."""

    def __init__(self, room: Room):
        super().__init__(room)
        self.waiting: list[tuple[tuple[int, int], Job]] = []
        self.running: dict[int, tuple[Job, Taken]] = {}

    def standing(self, job: Job) -> tuple[int, int]:
        """Return the rank of a job; smaller is better. It does not change while a job waits."""
        raise NotImplementedError

    def submit(self, now_ns: int, job: Job) -> None:
        heappush(self.waiting, (self.standing(job), job))

    def finish(self, now_ns: int, job: Job) -> None:
        del self.running[job.number]

    def decide(self, now_ns: int) -> int:
        while self.waiting:
            stands, job = self.waiting[0]
            if not (self.room.pool.fits(job.gpus) or self._make_room(stands, job)):
                break
            taken = self.room.pool.take(job.gpus)
            assert taken
            heappop(self.waiting)
            self.running[job.number] = (job, taken)
            self.room.start(job, taken)
        return self.next_change()

    def next_change(self) -> int:
        return 0

    def _make_room(self, stands: tuple[int, int], job: Job) -> bool:
        pool = self.room.pool
        worse = [(s, j, t) for j, t in self.running.values() if (s := self.standing(j)) > stands]
        if pool.total + sum(j.gpus for _, j, _ in worse) < job.gpus:
            return False
        worse.sort(key=lambda each: each[0], reverse=True)
        used = []
        for each in worse:
            pool.give(each[2])
            used.append(each)
            if pool.fits(job.gpus):
                break
        fits = pool.fits(job.gpus)
        for each in used:
            for node, gpus in each[2]:
                pool.change(node, -gpus)
        for _, other, _ in used if fits else ():
            del self.running[other.number]
            self.room.stop(other)
            heappush(self.waiting, (self.standing(other), other))
        return fits


class Srtf(Preemptive):
    def standing(self, job: Job) -> tuple[int, int]:
        return self.room.remaining_ns(job), job.number


class Tiresias(Preemptive):
    """Least attained service in two queues (NSDI 2019): a job drops to the second queue after an hour on one GPU, half
    an hour on two, and so on. Each queue is first come, first served."""

    LIMIT = 3600 * S

    def standing(self, job: Job) -> tuple[int, int]:
        return int(self.room.served_ns(job) * job.gpus >= self.LIMIT), job.number

    def next_change(self) -> int:
        if not self.waiting:
            return 0
        left = [self.LIMIT // j.gpus - self.room.served_ns(j) for j, _ in self.running.values()]
        return min((self.room.now_ns + each + 1 for each in left if each >= 0), default=0)


POLICIES: dict[str, Callable[[Room], Policy]] = {
    "fifo": fifo,
    "easy": Backfilling,
    "conservative": Conservative,
    "sjf": sjf,
    "srtf": Srtf,
    "tiresias": Tiresias,
}
