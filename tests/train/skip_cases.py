"""Cases of the tests of skipped steps, run inside pool workers."""

import math

import torch

from phalanx.train.state import State
from tests.cases import connect


def skip_one(args):
    """Compare three steps, the second of them skipped, with the first and third alone."""
    rank = connect(args)
    digests = []
    for skip in (True, False):
        rank.engine.step(rank.batches(0))
        if skip:
            result = rank.engine.gradients(rank.batches(1))
            result.grads = {name: grad * math.nan for name, grad in result.grads.items()}
            result.skip = "a test"
            rank.engine.update(result)
        else:
            rank.state.step += 1  # the rate depends on it
        rank.engine.step(rank.batches(2))
        digests.append(rank.state.digest())
        about = {"step": rank.state.step, "updates": rank.state.updates}
        if skip:
            rank.close()
            rank.generation += 1_000_000
            rank.state = State.create(rank.job, rank.family, rank.coord, rank.device)
            rank.build()
    rank.close()
    return {"digest": digests[0], "without": digests[1], **about, "updates": rank.state.updates}


def poison(args):
    """Skip a step whose gradients are not numbers, then run one that is sound."""
    rank = connect(args)
    rank.engine.step(rank.batches(0))
    batches = rank.batches(1)
    with torch.no_grad():
        kept = {k: p.detach().clone() for k, p in rank.state.params.items()}
        for param in rank.state.params.values():
            param.detach().fill_(math.nan)
    result = rank.engine.gradients(batches)
    for name, param in rank.state.params.items():
        param.detach().copy_(kept[name])
    result.skip = "a test"
    rank.engine.update(result)
    result = rank.engine.step(rank.batches(2))
    rank.close()
    return {"finite": math.isfinite(float(result.grad_norm))}
