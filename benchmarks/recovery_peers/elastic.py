"""One rank under torchrun: DDP over Gloo, a checkpoint after every step, resumed from after a restart."""

import os
import sys

import torch
import torch.distributed as dist
from model import Journal, backward, batch, build
from torch.nn.parallel import DistributedDataParallel


def main(journal: str, checkpoint: str) -> None:
    out = Journal(journal)
    rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    out.say(type="start", replica=rank)
    dist.init_process_group("gloo")
    model, optimizer = build()
    step = 0
    if os.path.exists(checkpoint):
        held = torch.load(checkpoint, mmap=True)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        step = held["step"]
    ddp = DistributedDataParallel(model)
    while True:
        optimizer.zero_grad()
        backward(ddp, batch(step, rank))
        optimizer.step()
        step += 1
        out.say(type="commit", replica=rank, step=step, generation=generation, members=dist.get_world_size())
        if rank == 0:
            torch.save(
                {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint + "~"
            )
            os.replace(checkpoint + "~", checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
