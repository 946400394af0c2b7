"""The rank's part of benchmarks/staleness.py: one small model, trained in three ways on the same samples."""

from __future__ import annotations

import sysconfig
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from phalanx.core.job import Job
from phalanx.model.dense import DENSE, Decoder
from phalanx.model.family import Batch
from phalanx.parallel.rendezvous import MeetingStore

BETAS, CLIP = (0.9, 0.95), 1.0
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # the published values for semi-synchronous training (arXiv:2311.08105)
CHECKED = 64  # sequences for validation


class Trainer:
    def __init__(self, job: Job, lr: float):
        torch.manual_seed(job.seed)
        self.job, self.model = job, Decoder(job.model)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                how = DENSE.init(name, job.model)
                parameter.normal_(how.mean, how.std) if how.std else parameter.fill_(how.mean)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=BETAS, weight_decay=0.1)
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.data, self.held_out = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    def batch(self, number: int, data: torch.Tensor | None = None, size: int = 0) -> Batch:
        """Return the sequences of a batch number: the same in every way of training."""
        length, chosen = self.job.train.seq_len, self.data if data is None else data
        rng = torch.Generator().manual_seed(1_000_003 * self.job.seed + number)
        starts = torch.randint(len(chosen) - length - 1, (size or self.job.train.micro_batch,), generator=rng)
        rows = torch.stack([chosen[i : i + length + 1] for i in starts.tolist()])
        return Batch(rows[:, :-1], rows[:, 1:], torch.ones(rows[:, 1:].shape))

    def loss(self, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(self.model(batch).flatten(0, 1), batch.targets_BL.flatten())

    def gradient(self, number: int) -> torch.Tensor:
        self.model.zero_grad()
        self.loss(self.batch(number)).backward()
        return parameters_to_vector([p.grad for p in self.model.parameters()])

    def update(self, gradient: torch.Tensor) -> None:
        at = 0
        for p in self.model.parameters():
            p.grad = gradient[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()

    @property
    def weights(self) -> torch.Tensor:
        return parameters_to_vector(self.model.parameters()).detach().clone()

    @weights.setter
    def weights(self, vector: torch.Tensor) -> None:
        vector_to_parameters(vector, self.model.parameters())

    @torch.no_grad()
    def validate(self) -> float:
        return float(self.loss(self.batch(-1, self.held_out, CHECKED)))


def train(args):
    """Train one way (`way`: sync, server or local). Rank 0 answers with the validation loss by samples."""
    job, rank = Job.from_dict(args["job"]), args["rank"]
    world = job.layout.world_size
    store = MeetingStore(args["store"], ("case", args["generation"]))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainer = Trainer(job, args["lr"])
    try:
        return globals()[f"_{args['way']}"](trainer, rank, world, args)
    finally:
        dist.destroy_process_group()


def _sync(trainer, rank, world, args):
    curve = {}
    for step in range(args["steps"]):
        gradient = trainer.gradient(step * world + rank)
        dist.all_reduce(gradient)
        trainer.update(gradient / world)
        _note(curve, trainer, step + 1, args, rank)
    return curve


def _local(trainer, rank, world, args):
    """Take separate steps on each rank; now and then average their progress, and continue from the average."""
    outer, velocity, curve = trainer.weights, 0.0, {}
    for step in range(args["steps"]):
        trainer.update(trainer.gradient(step * world + rank))
        if (step + 1) % args["every"] == 0 or step + 1 == args["steps"]:
            moved = outer - trainer.weights
            dist.all_reduce(moved)
            moved /= world
            velocity = OUTER_MOMENTUM * velocity + moved
            outer = outer - OUTER_LR * (moved + OUTER_MOMENTUM * velocity)
            trainer.weights = outer
            _note(curve, trainer, step + 1, args, rank)
    return curve


def _server(trainer, rank, world, args):
    """Send a gradient, get weights and continue, whatever the others do; rank 0 is the server too. Ranks come in turns,
    so that a gradient is as many updates old as there are other ranks, plus `older`."""
    weights, curve = trainer.weights, {}
    if rank:
        for step in range(args["steps"]):
            trainer.weights = weights
            dist.send(trainer.gradient(step * world + rank), 0)
            dist.recv(weights, 0)
        return curve
    served = deque([weights], maxlen=args["older"] + 1)
    mine, master = weights, weights
    for step in range(args["steps"]):
        for worker in range(world):
            if worker:
                gradient = torch.empty_like(weights)
                dist.recv(gradient, worker)
            else:
                trainer.weights = mine
                gradient = trainer.gradient(step * world)
            trainer.weights = master
            trainer.update(gradient)
            master = trainer.weights
            served.append(master)
            if worker:
                dist.send(served[0], worker)
            else:
                mine = served[0]
        trainer.weights = master
        _note(curve, trainer, step + 1, args, rank)
    return curve


def _note(curve, trainer, step, args, rank):
    if rank == 0 and (step % args["look"] == 0 or step == args["steps"]):
        curve[str(step)] = trainer.validate()
