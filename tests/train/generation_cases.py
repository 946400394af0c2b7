"""A worker that dies at the point of a step that its arguments name, {"step", "at"}, or whose state nobody can take."""

import os
import signal
import socket

import torch.distributed as dist

from phalanx.parallel.groups import Groups
from phalanx.train import engine, transfer, worker


def main(channel, args):
    if args["die"] == "refuse":
        refuse()
    elif args["die"]:
        plant(args["die"]["step"], args["die"]["at"])
    worker.main(channel, args)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    """Name a port at which nobody listens."""
    begin = transfer.Giver.__init__

    def begun(self, peers, device):
        begin(self, peers, device)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]

    transfer.Giver.__init__ = begun


def plant(step, at):
    at_step = lambda state: state.step == step  # noqa: E731
    gradients, total, update = engine.Engine.gradients, Groups.total, engine.apply

    if at in ("forward", "gradients", "again"):
        tries = []

        def dying(self, *args):
            tries.append(at_step(self.state))
            if sum(tries) == {"forward": 1, "again": 2}.get(at):  # "again": when the step is redone
                die()
            result = gradients(self, *args)
            if at == "gradients" and at_step(self.state):
                die()
            return result

        engine.Engine.gradients = dying
    elif at in ("voting", "voted"):

        def voting(self, values, guard):
            is_vote = values.numel() == 4
            if dying_state[0] and is_vote and at == "voting":
                dist.all_reduce(values)  # inside the replica, and not across
                die()
            out = total(self, values, guard)
            if dying_state[0] and is_vote:
                die()
            return out

        dying_state = [False]

        def noting(self, *args):
            dying_state[0] = at_step(self.state)
            return gradients(self, *args)

        engine.Engine.gradients, Groups.total = noting, voting
    else:
        assert at == "update", at

        def updating(job, state, result):
            if at_step(state):
                for param in list(state.params.values())[: len(state.params) // 2]:
                    param.data.add_(1.0)
                die()
            update(job, state, result)

        engine.apply = updating
