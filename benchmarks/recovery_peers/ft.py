"""One replica group of one rank under torchft: `ft.py replica JOURNAL LIGHTHOUSE NUMBER`; and its lighthouse:
`ft.py lighthouse JOURNAL HEARTBEAT_MS JOIN_MS TICK_MS`, which says where it listens."""

import sys
import time

import torch
import torch.distributed as dist
from model import Journal, backward, batch, build


def lighthouse(out: Journal, heartbeat_ms: str, join_ms: str, tick_ms: str) -> None:
    from torchft._torchft import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=int(join_ms),
        quorum_tick_ms=int(tick_ms),
        heartbeat_timeout_ms=int(heartbeat_ms),
    )
    out.say(type="lighthouse", address=server.address())
    while True:
        time.sleep(60)


def replica(out: Journal, address: str, number: str) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    class Surviving(DistributedDataParallel):
        """In 0.2.0 an all-reduce that fails ends the survivor too, where waiting for it raises, as over Gloo: the hook
        asserts a future that is not there. This one goes on; the manager has noted the error and won't commit."""

        @staticmethod
        def _comm_hook(manager: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            work = manager.allreduce(bucket.buffer())
            work.wait()
            if (future := getattr(work.get_future(), "_fut", None)) is None:
                future = torch.futures.Future()
                future.set_result(bucket.buffer())
            return future

    out.say(type="start", replica=int(number))
    model, adamw = build()

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        hostname="localhost",
    )
    ddp, optimizer = Surviving(manager, model), Optimizer(manager, adamw)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()  # asks for a quorum, beside the forward pass
        backward(ddp, batch(step, int(number)))
        optimizer.step()  # if all members agree
        done, takes_part = manager.current_step(), manager.participating_rank() is not None
        if done > step and takes_part:  # one that is healed takes part from its second step on
            out.say(type="commit", replica=int(number), step=done, generation=0, members=manager.num_participants())


if __name__ == "__main__":
    {"lighthouse": lighthouse, "replica": replica}[sys.argv[1]](Journal(sys.argv[2]), *sys.argv[3:])
