"""The dense family on a slow device: a pass waits as long as model.options says, as a host does for its accelerator. So
several ranks share a core and still take as long as they would alone."""

import time

from phalanx import Family
from phalanx.model.dense import DENSE, Decoder


class Waiting(Decoder):
    def __init__(self, config):
        super().__init__(config)
        self.pass_s = float(config.options["pass_s"])

    def forward(self, batch, x=None):
        time.sleep(self.pass_s)
        return super().forward(batch, x)


FAMILY = Family(build=Waiting, init=DENSE.init, split=DENSE.split, units=DENSE.units, first=DENSE.first,
                last=DENSE.last)  # fmt: skip
