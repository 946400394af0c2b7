"""Records which checkpoint has the best validation loss, in a file beside the checkpoints of its lineage. The run
writes it after each validation; the keeper reads it before it removes anything."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

from phalanx.core import document
from phalanx.core.errors import UserError
from phalanx.core.store import Store

FILE = "best.json"
FORMAT = 1


@dataclass
class Best:
    lineage: str
    every_steps: int = 0  # its multiples are validated
    step: int = -1  # the best; -1: none yet
    loss: float = math.inf
    judged: int = -1  # the last step that was validated

    def judge(self, step: int, loss: float) -> None:
        self.judged = max(self.judged, step)
        if loss < self.loss or step == self.step:
            self.step, self.loss = step, loss

    def spares(self, step: int) -> bool:
        """Return whether to keep the checkpoint of a step: it is the best, or may turn out to be."""
        return step == self.step or (step > self.judged and self.every_steps > 0 and step % self.every_steps == 0)

    @staticmethod
    def read(store: Store) -> Best | None:
        """Read the file; None: it is missing or damaged. Raises OSError if it cannot be read now, UserError if it is
        newer."""
        try:
            body = json.loads(store.read(FILE))
            document.check_version({"format": FORMAT, **body}, FORMAT, f"{store.url}/{FILE}")
            return document.make(Best, {**body, "loss": math.inf if body["loss"] is None else float(body["loss"])})
        except UserError:
            raise
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def write(self, store: Store) -> None:
        """Write the file. Raises OSError."""
        body = {"format": FORMAT} | dataclasses.asdict(self) | {"loss": self.loss if math.isfinite(self.loss) else None}
        store.write(FILE, json.dumps(body).encode())
