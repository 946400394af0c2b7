"""The dense family, which logs the tokens that it is given: what a rank really trained on."""

import json

from phalanx import Family
from phalanx.model.dense import DENSE, Decoder


class Logging(Decoder):
    def forward(self, batch, x=None):
        print("TOKENS", json.dumps(batch.tokens_BL.tolist()), flush=True)
        return super().forward(batch, x)


FAMILY = Family(
    build=Logging,
    init=DENSE.init,
    split=DENSE.split,
    units=DENSE.units,
    first=DENSE.first,
    last=DENSE.last,
)
