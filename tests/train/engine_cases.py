"""Cases of the engine tests, run inside pool workers."""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from phalanx.core.job import Job
from phalanx.parallel.groups import Groups, break_connections, form_cross
from phalanx.parallel.reduce import StepFailed
from phalanx.parallel.rendezvous import MeetingStore
from tests.cases import CPU, Rank, connect


def _same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _grads(rank: Rank, step: int = 0) -> dict:
    return {k: v.clone() for k, v in rank.engine.gradients(rank.batches(step)).grads.items()}


def _meet(rank: Rank, args, point: str) -> None:
    """Wait until every rank of the job is here."""
    key = f"{point}{args['generation']}/"
    rank.store.set(f"{key}{args['rank']}", "")
    rank.store.wait([f"{key}{r}" for r in range(rank.job.layout.world_size)])


def _held() -> list[int]:
    """Count threads, including those that Python does not know, and descriptors."""
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


class Boom(RuntimeError):
    pass


def rebuild(args):
    """Raise in the middle of the second micro-batch's backward, rebuild, redo; several times."""
    rank = connect(args)
    rank.close()
    without = _held()
    rank.generation = args["generation"] * 1000
    rank.build()
    clean = _grads(rank)
    before = {k: v.detach().clone() for k, v in rank.state.params.items()}
    resources = []
    for attempt in range(args["times"]):
        calls = iter(range(100))

        def explode(*_, calls=calls):
            if next(calls) == 1:
                raise Boom

        rank.engine.model.layers["1"].register_full_backward_pre_hook(explode)
        try:
            rank.engine.gradients(rank.batches(0))
            return "the fault was not injected"
        except Boom:
            pass
        rank.close()
        rank.generation = args["generation"] * 1000 + attempt + 1
        rank.build()
        if not _same(_grads(rank), clean):
            return f"attempt {attempt}: the redone gradients differ from the clean ones"
        resources.append(_held())
    if not _same(before, {k: v.detach() for k, v in rank.state.params.items()}):
        return "the failed steps changed the weights"
    rank.close()
    return {"resources": [*resources, without, _held()]}


def retry_without_rebuild(args):
    """Redo the same fault on the half-run engine, as the negative control."""
    rank = connect(args)
    clean = _grads(rank)
    calls = iter(range(100))

    def explode(*_):
        if next(calls) == 1:
            raise Boom

    hook = rank.engine.model.layers["1"].register_full_backward_pre_hook(explode)
    try:
        rank.engine.gradients(rank.batches(0))
    except Boom:
        hook.remove()
    try:
        same = _same(_grads(rank), clean)
    except Exception:
        same = False
    rank.close()
    return same


def reform_cross(args):
    """Drop the cross-replica groups between two steps and form them again; the model is untouched."""
    rank = connect(args)
    first = _grads(rank)
    rank.engine.rejoin(form_cross(rank.store, args["generation"] * 1000 + 1, rank.job.layout, rank.coord, rank.device))
    second = _grads(rank)
    rank.close()
    return _same(first, second)


def lose_cross(args):
    """Let replica 1 drop its cross-replica group before the step. Replica 0 must get an error soon, after all of its
    own shard collectives, with its weights untouched."""
    rank = connect(args)
    before = {k: v.detach().clone() for k, v in rank.state.params.items()}
    _meet(rank, args, "formed")  # a group that loses a member while it forms is another matter
    if rank.coord.replica == 1:
        rank.groups.cross.close()
        rank.close()
        return {"failed": None}
    try:
        rank.engine.step(rank.batches(0))
        failed = ""
    except StepFailed as error:
        failed = str(error)
    out = {"failed": failed, "step": rank.state.step}
    out["untouched"] = _same(before, {k: v.detach() for k, v in rank.state.params.items()})
    rank.close()
    return out


def overlap(args):
    """Run five steps; return when each bucket's reduction started and was done, and the backward's end, in ns."""
    rank, steps = connect(args), []
    for _ in range(5):
        end = round(1e9 * rank.engine.gradients(rank.batches(0)).passed)
        buckets = [[t.size_bytes, t.started_ns - end, t.done_ns - end] for t in rank.engine.reducer.trace]
        steps.append(buckets)
    rank.close()
    return steps


def collectives(args):
    """Count the all-gathers and reduce-scatters that one step makes inside the replica."""
    rank = connect(args)
    rank.engine.step(rank.batches(0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rank.engine.step(rank.batches(1))
    counts = {e.key: e.count for e in profile.key_averages()}
    rank.close()
    return {
        "gathers": sum(n for k, n in counts.items() if "c10d::" in k and "allgather" in k),
        "scatters": sum(n for k, n in counts.items() if "c10d::" in k and "reduce_scatter" in k),
    }


def saved_bytes(args):
    """Count the bytes that autograd keeps between forward and backward."""
    rank = connect(args)
    rank.engine.gradients(rank.batches(0))
    kept = 0

    def pack(tensor):
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        scaled, _ = rank.engine.model(rank.batches(0)[0])
    scaled.backward()
    rank.close()
    return kept


def compression(args):
    """Compare the reduced gradients of a few steps with the job's codec, summed, with uncompressed ones."""
    rank = connect(args)
    steps = args["steps"]
    grads = []
    for _ in range(steps):
        grads.append(torch.cat([g.reshape(-1) for g in _grads(rank).values()]).numpy())
        rank.engine.reducer.commit()
    sent = rank.groups.cross.sent_bytes / steps
    np.savez(f"{args['stem']}-{args['rank']}.npz", one=grads[0], mean=sum(grads) / steps)
    rank.close()
    return sent


def first_gradients(args):
    """Save the gradients of the first step by name."""
    rank = connect(args)
    np.savez(f"{args['stem']}-{args['rank']}.npz", **{name: g.numpy() for name, g in _grads(rank).items()})
    rank.close()


def dtypes(args):
    rank = connect(args)
    seen = {}

    def look(module, args, output):
        seen["activation"] = str(output.dtype)

    rank.engine.model.layers["0"].register_forward_hook(look)
    out = rank.engine.gradients(rank.batches(0))
    seen["grad"] = str(next(iter(out.grads.values())).dtype)
    rank.engine.update(out)
    name, weight = next(iter(rank.state.params.items()))
    seen["weight"], seen["master"] = str(weight.dtype), str(rank.state.master(name).dtype)
    seen["moment"] = str(rank.state.moments(name)["exp_avg"].dtype)
    rank.close()
    return seen


def world_size(args):
    rank = connect(args)
    size = dist.get_world_size()
    rank.close()
    return size


def listening_addresses(pid) -> list[str]:
    """List the addresses on which a process listens, as /proc/net writes them."""
    mine = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def listening(args):
    rank = connect(args)
    found = listening_addresses("self")
    rank.close()
    return found


def prefetched(args):
    """Return whether the second block's parameters are gathered before the first block has finished."""
    rank = connect(args)
    rank.engine.step(rank.batches(0))

    def in_the_first_block(*_):
        with torch.profiler.record_function("in the first block"):
            pass

    rank.engine.model.layers["0"].ffn.register_forward_pre_hook(in_the_first_block)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        rank.engine.model(rank.batches(1)[0])
    begun = {e.name: e.time_range.start for e in reversed(profile.events())}
    (gather,) = (name for name in begun if name.startswith("FSDP::all_gather (") and "layers.1" in name)
    rank.close()
    return begun[gather] < begun["in the first block"]


def not_finite(args):
    """Run a step whose gradients overflow, then a good one; return weights and moments before and after each."""
    rank = connect(args)
    rank.engine.step(rank.batches(0))
    before = rank.state.digest()
    bad = rank.engine.gradients(rank.batches(1))
    next(iter(bad.grads.values())).fill_(float("nan"))
    bad.grad_norm.fill_(float("nan"))
    rank.engine.update(bad)
    after = rank.state.digest()
    rank.engine.step(rank.batches(2))
    last = rank.state.digest()
    rank.close()
    return {"untouched": before == after, "goes on": last["weights"] != after["weights"], "kept": len(bad.grads)}


def close_with_silent_peer(args):
    """Keep replica 1 away. Replica 0 has a bucket in flight and closes its engine all the same."""
    rank = connect(args)
    if rank.coord.replica == 0:
        rank.engine.reducer.link.add(None, [((0, 0), torch.zeros(1000))], [], [], feedback=False)
        rank.engine.reducer.link.flush(feedback=False)
        rank.engine.close()
    _meet(rank, args, "closed")
    if rank.coord.replica == 1:
        rank.engine.close()
    rank.groups.close()
    return True


def formed_after_a_failure(args):
    """Rank 0 first waits in vain for peers that never come."""
    job = Job.from_dict(args["job"])
    coord, where = job.layout.coord(args["rank"]), (args["store"], ("case", args["generation"]))
    store = MeetingStore(*where)
    if args["rank"] == 0:
        threading.Timer(0.3, break_connections).start()
        with contextlib.suppress(RuntimeError):
            Groups.form(store, 10**6 + args["generation"], job.layout, coord, CPU)
            raise AssertionError("it was formed")
        store = MeetingStore(*where)
    groups = Groups.form(store, args["generation"], job.layout, coord, CPU)
    (total,) = groups.total(torch.tensor([1]), lambda work: True)
    groups.close()
    return total
