"""Explain to users why a gang is where it is, what it waits for, and when it will start."""

from __future__ import annotations

from phalanx.control.schedule.asks import S
from phalanx.control.schedule.gangs import CLAIMING, RUNNING, WAITING, Gang
from phalanx.control.schedule.moving import plan_moves
from phalanx.control.schedule.scheduler import Scheduler

SHOWN = 4  # nodes named in one sentence


def why(scheduler: Scheduler, job: str, now_ns: int) -> list[str]:
    """Describe a gang in sentences: its present state first, then its latest decisions."""
    gang = scheduler.gangs[job]
    lines = [_present(scheduler, gang, now_ns)]
    if gang.state == WAITING and job not in scheduler.held:
        lines += _waiting(scheduler, gang, now_ns)
    return lines + [f"{_ago(now_ns - at)} ago: {text}" for at, text in reversed(gang.notes)]


def _present(scheduler: Scheduler, gang: Gang, now_ns: int) -> str:
    if gang.state == RUNNING:
        nodes = sorted({scheduler.names[node] for spots in gang.replicas.values() for node, _ in spots})
        more = f", spares {', '.join(scheduler.names[n] for n in gang.spares)}" if gang.spares else ""
        shown = ", ".join(nodes[:8]) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")
        more += f", as a guest until {', '.join(gang.visit.holders)} can start" if gang.visit else ""
        return f"{gang.job} runs with {len(gang.replicas)} of {gang.ask.replicas} replicas on {shown}{more}"
    if gang.state == CLAIMING:
        owed = sum(gang.owed.values())
        return f"{gang.job} has its places and starts when {owed} GPUs of them are free{_lends(gang)}"
    if gang.job in scheduler.held:
        return f"{gang.job} waits for a cheaper hour: it starts in {_ago(gang.slots[0][0] - now_ns)}"
    return f"{gang.job} is {gang.state}"


def _waiting(scheduler: Scheduler, gang: Gang, now_ns: int) -> list[str]:
    ask, cells, rules = gang.ask, scheduler.cells, scheduler.rules
    need = ask.needs_gpus
    ahead = next(i for i, other in enumerate(scheduler.lines.waiting()) if other is gang)
    lines = [f"{ahead} gangs are before it"]
    shape = f"{ask.fewest} x {ask.nodes} nodes with {ask.gpus} GPUs" + (f" inside one {ask.level}" if ask.level else "")
    if refusal := scheduler.refusal(gang, need):
        lines.append(f"it may not start: {refusal}")
    elif need > cells.open_gpus:
        lines.append(f"it needs {need} GPUs, and the nodes that are up have {cells.open_gpus}{_out(scheduler, now_ns)}")
    elif need > cells.free_gpus:
        lines.append(f"it needs {need} GPUs, and {cells.free_gpus} are free")
    else:
        lines.append(f"{cells.free_gpus} GPUs are free, but in pieces: it needs {shape}")
        lines.append(_moves(scheduler, gang, now_ns))
    ends = [g.began_ns + g.ask.limit_ns for g in scheduler.running.values() if g.ask.limit_ns]
    if ends:
        lines.append(f"a gang with a time limit ends in {_ago(max(0, min(ends) - now_ns))} at the latest")
    if need <= cells.open_gpus:
        late = max(0, gang.since_ns + rules.patience_ns - now_ns)
        each = rules.turn_ns + rules.grace_ns + rules.look_ns
        lines.append(
            f"it is overdue in {_ago(late)}, and starts within {_ago(late + (ahead + 1) * each)} at the latest"
        )
    return lines


def _lends(gang: Gang) -> str:
    stay = ", ".join(gang.blockers[:SHOWN])
    saving = f": {stay} may stay for a while" if stay else ": others are saving their state"
    return saving + (f"; until then it lends to {', '.join([*gang.guests][:SHOWN])}" if gang.guests else "")


def _moves(scheduler: Scheduler, gang: Gang, now_ns: int) -> str:
    found = plan_moves(gang, scheduler.at, scheduler.running, scheduler.cells, scheduler.rules, now_ns)
    if not found:
        return "no few gangs can move to make one place of them"
    names = ", ".join(mover.job for mover, _ in found.targets)
    left_ns = gang.idle_ns + -(-found.cost // gang.ask.needs_gpus) - now_ns
    when = f"in {_ago(left_ns)}, when its wait has cost as much as that" if left_ns > 0 else "at the next look"
    return f"{names} can move to make one place of them: they do so {when}"


def _out(scheduler: Scheduler, now_ns: int) -> str:
    """List the nodes that are not up, and why."""
    out = [n for n, closed in enumerate(scheduler.cells.closed) if closed]
    shown = [f"{scheduler.names[n]} is {scheduler.wards.said(n, now_ns)}" for n in out[:SHOWN]]
    more = f"; and {len(out) - SHOWN} more" if len(out) > SHOWN else ""
    return f" ({'; '.join(shown)}{more})" if shown else ""


def _ago(ns: int) -> str:
    s = max(0, ns) // S
    return f"{s // 3600} h {s % 3600 // 60} min" if s >= 3600 else f"{s // 60} min {s % 60} s" if s >= 60 else f"{s} s"
