"""The dense family with a fault: what, on which rank and in which step is in model.options."""

import time

import torch
import torch.distributed as dist
from torch import nn

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
        elif what == "memory":
            print("about to take a petabyte")
            torch.empty(1 << 50, dtype=torch.uint8)
        out = super().forward(batch)
        if what == "nan":
            return out * torch.nan
        return RaiseInBackward.apply(out) if what == "backward" else out


def sleep_for_ever():
    time.sleep(3600)


class Careless(Decoder):
    """A buffer, which would never get its values."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mask", torch.ones(3))


FAULTY = Family(build=Faulty, init=DENSE.init, split=DENSE.split)
WRONG_STYLE = Family(build=Decoder, init=DENSE.init, split=DENSE.split | {"norm": "column"})
UNKNOWN_STYLE = Family(build=Decoder, init=DENSE.init, split=DENSE.split | {"head": "diagonal"})
NO_MATCH = Family(build=Decoder, init=DENSE.init, split=DENSE.split | {"layers.*.mlp": "gather"})
NO_UNIT = Family(build=Decoder, init=DENSE.init, split=DENSE.split, units=("blocks.*",))
BUFFER = Family(build=Careless, init=DENSE.init, split=DENSE.split)
UNSPLIT = Family(build=Decoder, init=DENSE.init, split={k: v for k, v in DENSE.split.items() if k != "embed"})
NO_INIT = Family(build=Decoder, init=lambda name, config: 0.02, split=DENSE.split)
NO_BUILD = Family(build=lambda config: config.options["depth"], init=DENSE.init, split=DENSE.split)
SMALL_HEAD = Family(
    build=lambda c: nn.ModuleDict({"head": nn.Linear(4, 5)}), init=DENSE.init, split={"head": "head"}, units=()
)
NOT_A_FAMILY = {"build": Decoder}
