"""The exceptions of a user's mistake, of a failed run, of a run whose time is up, and of a peer's mistake.

The first two print without a traceback. `UserError` always says what was wrong, where, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """Something the user can fix: names the field, the value and the remedy."""

    def __init__(self, message: str, *, field: str = "", value: object = None, remedy: str = ""):
        self.field, self.value, self.remedy, self.message = field, value, remedy, message
        text = message
        if field:
            text = f"{field} = {value!r}: {message}"
        if remedy:
            text += f"\n  remedy: {remedy}"
        super().__init__(text)


def together(wrong: Sequence[UserError]) -> UserError:
    """Join all errors into one, so that they can be fixed at once. Its field is that of the first."""
    first = wrong[0]
    if len(wrong) == 1:
        return first
    text = "\n".join(f"  {line}" for each in wrong for line in str(each).splitlines())
    error = UserError(f"{len(wrong)} things are wrong:\n{text}")
    error.field, error.value, error.remedy = first.field, first.value, first.remedy
    return error


class RunFailed(RuntimeError):
    """A run that could not continue: which rank, how it ended, its last log lines."""

    def __init__(self, reason: str, *, rank: int | None = None, log_tail: str = "", remedy: str = ""):
        self.reason, self.rank, self.log_tail, self.remedy = reason, rank, log_tail, remedy
        text = reason
        if log_tail:
            whose = "" if rank is None else f" of rank {rank}"
            text += f"\n  last log lines{whose}:\n" + "\n".join(f"  | {line}" for line in log_tail.splitlines())
        if remedy:
            text += f"\n  remedy: {remedy}"
        super().__init__(text)


class TimeUp(KeyboardInterrupt):
    """A run that was stopped because its engine's time limit is near. It may be started again."""


MOST_INT = 1 << 63  # the largest that a peer may send: what is computed from it can still be printed, or made a float


class WireError(ValueError):
    """A peer sent what the protocol does not allow."""
