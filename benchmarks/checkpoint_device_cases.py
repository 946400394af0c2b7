"""The rank's part of checkpoint_device.py."""

import dataclasses
import time

import torch

from phalanx.checkpoint.keeper import Line
from phalanx.checkpoint.torch_state import Snapshotter
from phalanx.core.checkpoint import Manifest, Plan
from phalanx.core.job import Job
from phalanx.model.family import load_family
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.parallel.rendezvous import MeetingStore
from phalanx.train.engine import Engine
from phalanx.train.state import State
from tests.cases import make_batch


def snapshots(args):
    """Time steps with and without a snapshot under way, for each number of micro-batches."""
    job = Job.from_dict(args["job"])
    coord, family = job.layout.coord(0), load_family(job.model.family)
    device = Device.pick("auto", 0, 1)
    state = State.create(job, family, coord, device)
    store = MeetingStore(args["store"], ("case", args["generation"]))
    groups = Groups.form(store, args["generation"], job.layout, coord, device)
    plan = Plan.of(state.entries, job.layout, coord)
    base = Manifest("", 0, job.layout, state.entries, [], 0).to_json()
    line = Line(args["keeper"], args["rank"], plan.image_bytes, plan.own_bytes, base)
    snap = Snapshotter(line, state.entries, job.layout, coord, state.get, device, "run")
    rows = {}
    for micro in args["lengths"]:
        train = dataclasses.replace(job.train, global_batch=micro)
        longer = dataclasses.replace(job, train=train)
        engine = Engine(longer, family, coord, groups, state, device)
        rows[str(micro)] = measure(engine, [make_batch(longer, 0, i) for i in range(micro)], snap, args["times"])
        engine.close()
    for slot in line.slots:
        assert slot.header(), "it was not sealed"
        slot.verify()
    groups.close()
    return {"rows": rows, "bytes": sum(s.size for s in plan.segments), "device": device.describe()}


def measure(engine, batches, snap, times):
    device, state = engine.device, engine.state

    def timed(call):
        device.synchronize()
        began = time.perf_counter()
        out = call()
        device.synchronize()
        return time.perf_counter() - began, out

    for _ in range(3):
        engine.step(batches)

    def fill_both_slots():
        for _ in range(2):
            snap.begin(state.step, durable=False)
            snap.wait()
            snap.finish()
            engine.step(batches)

    fill_both_slots()  # the first snapshots pin the slots
    out = {"plain_s": [], "passes_s": [], "raw_s": [], "with_s": [], "host_s": [], "hash_s": []}
    rooms = [snap.image(0)[s.offset : s.offset + s.size] for s in snap.plan.segments]
    sources = [snap.source.bytes_of(s) for s in snap.plan.segments]

    def copy():
        torch._foreach_copy_(rooms, sources, non_blocking=True)

    out["copy_s"] = [timed(copy)[0] for _ in range(3)]
    beside = device.new_stream()
    for _ in range(times):
        took, result = timed(lambda: engine.gradients(batches))
        engine.update(result)
        out["passes_s"].append(took)
        out["plain_s"].append(timed(lambda: engine.step(batches))[0])

        def with_raw_copy():
            with device.on(beside):
                copy()
                copied = device.mark()
            result = engine.gradients(batches)
            device.wait(None, copied)
            engine.update(result)

        out["raw_s"].append(timed(with_raw_copy)[0])

        def with_snapshot():
            began = time.perf_counter()
            snap.begin(state.step, durable=False)
            host = time.perf_counter() - began
            result = engine.gradients(batches)
            snap.wait()
            engine.update(result)
            return host

        took, host = timed(with_snapshot)
        out["with_s"].append(took)
        out["host_s"].append(host)
        began = time.perf_counter()
        snap.finish()
        out["hash_s"].append(time.perf_counter() - began)
    fill_both_slots()  # bare copies have overwritten one
    return out
