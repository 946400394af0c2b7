"""Phalanx trains large models across many accelerators and survives hardware failures.

    import phalanx
    run = phalanx.train({"model": {"preset": "tiny"}, "train": {"steps": 100}}, on_step=lambda row: print(row["loss"]))
    run.metrics, run.validations, run.checkpoints, run.weights()

Use `Family`, `Init`, `Batch`, `Attend` and `Head` to train a model of your own (phalanx.model.family). `phalanx.train`
is also a package with modules in it; importing one of them leaves `phalanx.train(...)` callable.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import phalanx.train as _room
from phalanx.core.errors import RunFailed, UserError

if TYPE_CHECKING:
    from inspect import Signature

    from phalanx.model import Attend, Batch, Family, Head, Init, Weight
    from phalanx.run.library import Checkpoint, Run, train

__version__ = "0.1.0"
__all__ = [
    "Attend",
    "Batch",
    "Checkpoint",
    "Family",
    "Head",
    "Init",
    "Run",
    "RunFailed",
    "UserError",
    "Weight",
    "__version__",
    "train",
]

_OF_MODELS = ("Attend", "Batch", "Family", "Head", "Init", "Weight")  # these need torch; importing phalanx must not
_OF_RUNS = ("Checkpoint", "Run")


class _Callable(ModuleType):
    # `phalanx.train` is both the package of that name and the function that runs a job. help() describes the function.

    @property
    def __signature__(self) -> Signature:
        import inspect

        from phalanx.run.library import train

        return inspect.signature(train)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        import inspect

        from phalanx.run.library import train

        return f"train{self.__signature__}\n\n{inspect.getdoc(train)}"

    def __call__(self, *args: Any, **options: Any) -> Run:
        from phalanx.run.library import train

        return train(*args, **options)


_room.__class__ = _Callable


def __getattr__(name: str) -> Any:
    if name in _OF_MODELS:
        import phalanx.model

        return getattr(phalanx.model, name)
    if name in _OF_RUNS:
        import phalanx.run.library

        return getattr(phalanx.run.library, name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
