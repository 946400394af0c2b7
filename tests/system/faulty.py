"""The dense family with a fault. model.options say which, on what rank and in which step."""

import contextlib
import os
import signal
import time

import torch
import torch.distributed as dist

from phalanx import Family
from phalanx.model.dense import DENSE, Decoder


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("the true cause")


class Faulty(Decoder):
    def __init__(self, config):
        super().__init__(config)
        self.fault, self.calls = config.options, 0

    def forward(self, batch):
        self.calls += 1
        here = dist.get_rank() == self.fault["rank"] and self.calls == self.fault["step"] + 1
        what = self.fault["what"] if here else ""
        if what == "sleep":
            sleep_for_ever()
        elif what == "kill":
            with contextlib.suppress(FileExistsError), open(self.fault["once"], "x"):
                os.kill(os.getpid(), signal.SIGKILL)
        elif what == "memory":
            torch.empty(1 << 50, dtype=torch.uint8)
        out = super().forward(batch)
        if what == "not a number":
            return out * torch.nan
        return RaiseInBackward.apply(out) if what == "backward" else out


def sleep_for_ever():
    time.sleep(3600)


FAULTY = Family(build=Faulty, init=DENSE.init, split=DENSE.split)
