"""Cases of the contained-redo tests, run inside pool workers: a run that is left alone, and one that loses replicas."""

import dataclasses
import hashlib

import numpy as np
import torch.nn.functional as F

from phalanx.core.deal import deal
from phalanx.core.layout import Coord
from phalanx.model.dense import DENSE, Block, Decoder
from phalanx.parallel.groups import form_cross
from phalanx.parallel.reduce import StepFailed
from tests.cases import Rank, connect, make_batch

STEPS = 3
LOST_IN = 1


class Dropping(Block):
    def feed(self, x_BLD, batch):
        return F.dropout(super().feed(x_BLD, batch), 0.3)


DROPOUT = dataclasses.replace(DENSE, build=lambda c: Decoder(c, lambda layer: Dropping(c)))


class Run:
    """A rank with an engine that is built once."""

    def __init__(self, args, number):
        args = args | {"generation": args["generation"] * 1000 + 100 * number}
        self.rank: Rank = connect(args, "redo")
        self.engine, self.job, self.me = self.rank.engine, self.rank.job, self.rank.coord.replica
        self.generation = args["generation"]
        self.there = list(range(self.job.layout.replica))
        self.said = {"grads": [], "norms": [], "loads": [], "losses": {}, "residuals": []}
        self.arrays = []

    def batches(self, step, dealt):
        return [make_batch(self.job, step, i) for i in self.job.micro_indices(self.rank.coord, dealt.todo[self.me])]

    def note(self, step, result):
        digest = hashlib.sha256()
        for name, grad in sorted(result.grads.items()):
            digest.update(name.encode() + grad.contiguous().cpu().numpy().tobytes())
        self.said["grads"].append(digest.hexdigest()[:16])
        self.said["norms"].append(float(result.grad_norm).hex())
        self.said["loads"].append({name: load.tolist() for name, load in result.loads.items()})
        self.arrays.append(np.concatenate([g.reshape(-1).double().numpy() for g in result.grads.values()]))
        assert len(result.loss_sums) in (0, len(result.indices))
        for i, loss in zip(result.indices, result.loss_sums.tolist(), strict=False):
            assert self.said["losses"].setdefault(f"{step}.{i}.{self.rank.coord.cp}", loss) == loss

    def whole_step(self, step):
        dealt = deal(self.job, self.there)
        result = self.engine.gradients(self.batches(step, dealt), dealt)
        self.note(step, result)
        self.engine.update(result)

    def lose(self, lost, held):
        """Form another group among the others; return the deal of what is missing now."""
        self.there = [r for r in self.there if r not in lost]
        self.generation += 1
        before = len(self.engine.groups.cross._residual)
        layout, collectives = self.job.layout, self.job.collectives
        about = (layout, self.rank.coord, self.rank.device, collectives, self.there)
        self.engine.rejoin(form_cross(self.rank.store, self.generation, *about))
        if cross := self.engine.groups.cross:
            self.said["residuals"].append((before, len(cross._residual)))
        dealt = deal(self.job, self.there, held)
        assert dealt.held[self.me] == self.engine.held
        return dealt

    def meet(self, point):
        key = f"{point}{self.generation}/"
        self.rank.store.set(f"{key}{self.rank.job.layout.rank(self.rank.coord)}", "")
        size = self.job.layout.replica_size
        self.rank.store.wait([f"{key}{r * size + i}" for r in self.there for i in range(size)])

    def close(self):
        self.said["digest"] = self.rank.state.digest()
        self.rank.close()
        return self.said


def contained(args):
    """Run alone, then with the loss of `lost` (lists of replicas, one after the other) at a point of a step: `pass` is
    before its last backward, `sums` after its sums, which were clipped already. With `half` or `half count` only one
    rank's connection to the other replicas is lost, before the sums or before the count of tokens."""
    alone = Run(args, 0)
    for step in range(STEPS):
        alone.whole_step(step)
    clean = alone.close()
    run = Run(args, 1)
    run.whole_step(0)
    built = run.engine
    if not disturbed(run, args["lost"], args["at"]):
        run.rank.close()
        return {"clean": clean}
    for step in range(LOST_IN + 1, STEPS):
        run.whole_step(step)
    assert run.rank.engine is built
    difference = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(alone.arrays, run.arrays, strict=True)]
    return {"clean": clean, "lossy": run.close(), "difference": max(difference)}


def disturbed(run, lost, at):
    """Run the step in which ranks are lost; False: this rank is among them."""
    engine, dealt = run.engine, deal(run.job, run.there)
    batches = run.batches(LOST_IN, dealt)
    if at == "half count" and run.rank.coord == Coord(0, 0, 0):
        engine.groups.cross.close()
    tokens = engine.count(batches)
    for gone in lost:
        run.meet("computing")
        if run.me in gone:
            if at == "sums":
                engine.compute(batches, dealt, tokens)
                engine.finish()
            return False
        if at == "half" and run.rank.coord == Coord(0, 0, 0):
            engine.groups.cross.close()
        engine.compute(batches, dealt, tokens)
        try:
            engine.finish()
            assert at == "sums", "the loss was not noticed"
        except StepFailed:
            assert at != "sums"
        dealt = run.lose(gone, {r: dealt.whole(r) for r in dealt.replicas if r not in gone})
        batches = run.batches(LOST_IN, dealt)
    result = engine.gradients(batches, dealt)
    run.note(LOST_IN, result)
    engine.update(result)
    return True
