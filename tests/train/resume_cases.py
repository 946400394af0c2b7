"""Cases of the resume tests, run on each rank (tests/train/test_resume.py)."""

import base64
import contextlib
import dataclasses
import json

import torch
import torch.nn.functional as F

from phalanx.checkpoint.files import commit, make_folder, make_tail, root_of, write_file
from phalanx.checkpoint.keeper import Line
from phalanx.checkpoint.torch_state import Snapshotter, rng_state
from phalanx.core.checkpoint import Facts, Manifest, Plan, file_name
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.core.store import open_store
from phalanx.model.family import load_family
from phalanx.parallel.rendezvous import MeetingStore
from phalanx.train.snapshots import Saver, resume, resume_from_memory
from phalanx.train.state import State
from tests.cases import CPU, Rank
from tests.checkpoint.faults import a_keeper

BEFORE, AFTER = 2, 2


@contextlib.contextmanager
def dropout():
    """Let the blocks' feed-forward drop out, from torch's own generator, so that the random state matters."""
    original = F.silu
    F.silu = lambda x: F.dropout(x * torch.sigmoid(x), 0.1, training=True)
    try:
        yield
    finally:
        F.silu = original


def steps(rank, first, count):
    norms = []
    with dropout():
        for step in range(first, first + count):
            norms.append(float(rank.engine.step(rank.batches(step)).grad_norm))
    return norms


def case_resume(args):
    """Run BEFORE steps, a snapshot, AFTER steps; then the same from the file, and from the memory, in new engines."""
    job, number = Job.from_dict(args["job"]), args["rank"]
    store = MeetingStore(args["store"], ("case", args["generation"]))
    torch.manual_seed(100 + number)
    rank = Rank(job, number, store, args["generation"] * 10)
    steps(rank, 0, BEFORE)
    state, plan = rank.state, Plan.of(rank.state.entries, job.layout, rank.coord)
    base = Manifest("base", 0, job.layout, state.entries, [], 0).to_json()
    with a_keeper(args["dir"], serve=True, ranks=job.layout.world_size) as keeper:
        line = Line(keeper.address, number, plan.image_bytes, plan.own_bytes, base)
        snapshots = Snapshotter(line, state.entries, job.layout, rank.coord, state.get, rank.device, "run")
        snapshots.begin(state.step, durable=False, about={"updates": state.updates})
        snapshots.wait()
        norms = steps(rank, BEFORE, AFTER)
        snapshots.close()
    slot = line.slots[0]
    straight = {"norms": norms, "digest": rank.state.digest(), "rng": rng_state(rank.device).hex()}
    name, target = slot.header()["checkpoint"], open_store(args["dir"])
    make_folder(target, name)
    rng = base64.b64decode(slot.header()["rng"])
    tail = make_tail({"checkpoint": name, "rank": number, "step": BEFORE}, rng, slot.hashes(own=True))
    write_file(target, f"{name}/{file_name(number)}", slot.image[: slot.own_bytes], tail)
    store.set(f"{args['generation']}/file{number}", f"{slot.own_bytes + len(tail)} {root_of(tail)}")
    if number == 0:
        files = []
        for other in range(job.layout.world_size):
            size, root = store.get(f"{args['generation']}/file{other}").decode().split()
            files.append((int(size), root))
        commit(target, Manifest(name, BEFORE, job.layout, state.entries, files, BEFORE))
        store.set(f"{args['generation']}/committed", "1")
    store.wait([f"{args['generation']}/committed"])
    rank.close()
    again = {}
    for i, how in enumerate(("file", "memory")):
        torch.manual_seed(999)

        def prepare(rank, how=how):
            if how == "file":
                resume(job, rank.coord, rank.state, rank.device, args["dir"], name)
            else:
                resume_from_memory(job.layout, rank.coord, rank.state, rank.device, slot)

        rank = Rank(job, number, store, args["generation"] * 10 + 1 + i, prepare)
        if args.get("forget_rng"):
            torch.manual_seed(1)
        norms = steps(rank, BEFORE, AFTER)
        again[how] = {"norms": norms, "digest": rank.state.digest(), "rng": rng_state(rank.device).hex()}
        rank.close()
    return {"name": name, "straight": straight, **again}


def case_import(args):
    """Start from weights without moments at step 1000: three steps, a snapshot, two more. Then redo those two from the
    snapshot, in a state that already has moments of its own."""
    job, number = Job.from_dict(args["job"]), args["rank"]
    store = MeetingStore(args["store"], ("case", args["generation"]))
    rank = Rank(job, number, store, args["generation"] * 10)
    steps(rank, 0, 1)
    rank.state.restore(lambda get: None, 1000, 0)
    steps(rank, 1000, 3)
    state, plan = rank.state, Plan.of(rank.state.entries, job.layout, rank.coord)
    base = Manifest("base", 0, job.layout, state.entries, [], 0).to_json()
    with a_keeper(args["dir"], serve=True, ranks=job.layout.world_size) as keeper:
        line = Line(keeper.address, number, plan.image_bytes, plan.own_bytes, base)
        saver = Saver.__new__(Saver)
        saver.job, saver.state, saver.facts = job, state, Facts(first_step=1000)
        snapshots = Snapshotter(line, state.entries, job.layout, rank.coord, state.get, rank.device, "run")
        snapshots.begin(state.step, durable=False, about=saver._about())
        snapshots.wait()
        straight = steps(rank, 1003, 2)
        snapshots.close()
    about = json.loads(line.slots[0].header()["seal"])
    resume_from_memory(job.layout, rank.coord, rank.state, rank.device, line.slots[0])
    again = steps(rank, 1003, 2)
    rank.close()
    return {"about": about, "straight": straight, "again": again, "counted": rank.state.optimizer._updates}


def case_load(args):
    """Load into this layout. Every slice is that of the whole tensors, as one process reads them."""
    job = Job.from_dict(args["job"])
    coord = job.layout.coord(args["rank"])
    state = State.create(job, load_family(job.model.family), coord, CPU)
    said = resume(job, coord, state, CPU, args["dir"], args["name"])
    single = dataclasses.replace(job, layout=Layout())
    whole = State.create(single, load_family(job.model.family), Layout().coord(0), CPU)
    resume(single, Layout().coord(0), whole, CPU, args["dir"], args["name"])
    wrong = []
    for entry in state.entries:
        held = entry.held
        if not held.held_by(job.layout, coord):
            continue
        r0, r1, c0, c1 = held.bounds(job.layout, coord)
        if r0 == r1 or c0 == c1:
            continue
        want = whole.get(held.name).detach()
        want = want[r0:r1, c0:c1] if want.dim() > 1 else want[r0:r1]
        if not torch.equal(state.get(held.name).detach(), want):
            wrong.append(held.name)
    return {"wrong": wrong, "step": state.step, "bytes_read": said["bytes_read"]}
