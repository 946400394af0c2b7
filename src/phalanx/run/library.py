"""The Python interface: `phalanx.train`, and the `Run` that it returns. The run is the same as with `phalanx train`, in
processes of its own. Hooks are called in the caller's process, between two events of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.core.job import Job
    from phalanx.model.family import Family
    from phalanx.run.planned import Forecast

Row = dict[str, Any]
OnStep = Callable[[Row], Mapping[str, float] | None]
OnEvent = Callable[[Row], object]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: str
    best: bool  # the best of those that were validated


class Run:
    """The results of a run, as plain Python. `Run("runs/...")` opens an earlier one."""

    def __init__(self, path: str | Path):
        from phalanx.observe.record import RunRecord

        self.path = Path(path)
        try:
            self._record = RunRecord.open(self.path)
        except FileNotFoundError as error:
            remedy = "name the folder of a run; `phalanx runs` lists them"
            raise UserError(str(error), field="path", value=str(path), remedy=remedy) from None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.summary.get('status', 'running')})"

    @property
    def summary(self) -> Row:
        """Return the final figures of the run; empty while it runs, and after a crash."""
        return self._record.summary or {}

    @property
    def metrics(self) -> list[Row]:
        """Return a row for each step: loss, grad_norm, lr, tokens_per_s, ..., and `own` for the return value of
        on_step."""
        return list(self._record.metrics())

    @property
    def validations(self) -> list[Row]:
        return [event for event in self._record.events() if event.get("type") == "validation"]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Return the good checkpoints, the newest first."""
        from phalanx.checkpoint.best import Best
        from phalanx.checkpoint.catalog import Catalog
        from phalanx.core.store import open_store
        from phalanx.run.start import FOLDER

        place = self._record.job["job"]["checkpoint"]["dir"] or str(self.path / FOLDER)
        store = open_store(place)
        best = Best.read(store)
        step = best.step if best else -1
        return [Checkpoint(f.step, f"{store.url}/{f.name}", f.step == step) for f in Catalog(store).good()]

    def weights(self, checkpoint: Checkpoint | None = None) -> dict[str, Tensor]:
        """Return the whole model of a checkpoint, by default the newest, as a state dict of the family's own module."""
        from phalanx.checkpoint.torch_foreign import state_dict

        chosen = checkpoint or next(iter(self.checkpoints), None)
        if chosen is None:
            remedy = "let it make some: checkpoint.every_steps must not be -1"
            raise UserError("the run has no checkpoint", field="run", value=str(self.path), remedy=remedy)
        return state_dict(chosen.path)


def train(
    job: Mapping[str, Any] | str | Path | None = None,
    sets: Sequence[str] = (),
    *,
    resume: str | Path | Run | Checkpoint = "",
    family: Family | str | None = None,
    on_step: OnStep | None = None,
    on_checkpoint: OnEvent | None = None,
    on_validation: OnEvent | None = None,
    quiet: bool = False,
) -> Run:
    """Run a job on this machine to its end.

    `job`: a mapping in the shape of the job file, the path of one, or None for the quickstart. `sets`: settings over
    it, as "train.steps=100". `resume`: "auto", "new", or what to continue: a run, a checkpoint, or the path of either.
    `family`: a model of your own, as an object or as "file.py:NAME". `on_step` gets each row of the metrics, and may
    return numbers of its own, which are recorded with it; `on_checkpoint` and `on_validation` get the event. `quiet`
    prints nothing. UserError: the job is wrong; RunFailed: the run ended early, and says why.
    """
    import phalanx.model.family as families
    from phalanx.run.console import Console
    from phalanx.run.planned import resolve
    from phalanx.run.training import run_job

    if families.being_imported:
        raise UserError(
            "phalanx.train was called by the file of the model, which each rank imports",
            field="model.family",
            value=families.being_imported[-1],
            remedy='call it under `if __name__ == "__main__":`, or from another file',
        )
    given = list(sets)
    if family is not None:
        given.append(f"model.family={_reference(job, given, family)}")
    resolved, forecast = resolve(job if isinstance(job, Mapping) or job is None else Path(job), given)
    place = resume.path if isinstance(resume, Run | Checkpoint) else resume
    with Console(resolved.job, forecast) as console:
        hooks = _Hooks(resolved.job, forecast, console, on_step, on_checkpoint, on_validation, quiet)
        try:
            summary = run_job(resolved.job, resolved.origins, hooks, str(place), forecast)
        except _HookRaised as raised:
            raise raised.error from None
    if "run_dir" in summary:
        return Run(summary["run_dir"])
    from phalanx.observe.record import run_folders  # the run had nothing left to do

    return Run(run_folders(Path(resolved.job.run.dir), resolved.job.name)[0])


def _reference(job: Mapping[str, Any] | str | Path | None, sets: Sequence[str], family: Family | str) -> str:
    """Return the family as a job file names it."""
    if isinstance(family, str):
        return family
    from phalanx.run.notebook import reference_of
    from phalanx.spec import folder_of_runs

    return reference_of(family, folder_of_runs(job, sets) / ".families")


class _HookRaised(Exception):
    """Carries an error of a user's hook past handlers that take a ValueError for a malformed message from a node."""

    def __init__(self, hook: str, error: Exception):
        super().__init__(f"{hook} raised {type(error).__name__}: {error}")
        self.error = error


def _call(hook: str, function: Callable[[Row], Any] | None, row: Row) -> Any:
    try:
        return function(row) if function else None
    except Exception as error:
        raise _HookRaised(hook, error) from error


class _Hooks:
    """A listener that also calls the user's functions."""

    def __init__(
        self,
        job: Job,
        forecast: Forecast | None,
        console: Any,
        on_step: OnStep | None,
        on_checkpoint: OnEvent | None,
        on_validation: OnEvent | None,
        quiet: bool,
    ):
        self._on_step, self._on_checkpoint, self._on_validation = on_step, on_checkpoint, on_validation
        said = _Silence() if quiet else console
        self.starting, self.status, self.note = said.starting, said.status, said.note
        self.facts, self.step, self.finished = said.facts, said.step, said.finished

    def measure(self, row: Row) -> Mapping[str, float] | None:
        own = _call("on_step", self._on_step, row)
        try:
            return {str(name): float(value) for name, value in own.items()} if own else None
        except (AttributeError, TypeError, ValueError):
            remedy = "return None, or a dict of numbers by name"
            wrong = UserError("it returned no numbers by name", field="on_step", value=own, remedy=remedy)
            raise _HookRaised("on_step", wrong) from None

    def checkpoint(self, event: Row) -> None:
        _call("on_checkpoint", self._on_checkpoint, event)

    def validation(self, event: Row) -> None:
        _call("on_validation", self._on_validation, event)


class _Silence:
    def starting(self, run_dir: Path) -> None: ...

    def status(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def facts(self, facts: Row) -> None: ...

    def step(self, row: Row) -> None: ...

    def finished(self, summary: Row) -> None: ...
