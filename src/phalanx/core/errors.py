"""The one exception a user's mistake may raise, the one a failed run raises, and the one for a peer's mistake.

The first two print without a traceback. `UserError` always says what was wrong, where, and what to do next.
"""

from __future__ import annotations


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


class RunFailed(RuntimeError):
    """A run that could not go on: which rank, how it ended, its last log lines."""

    def __init__(self, reason: str, *, rank: int | None = None, log_tail: str = "", remedy: str = ""):
        self.reason, self.rank, self.log_tail, self.remedy = reason, rank, log_tail, remedy
        text = reason
        if log_tail:
            whose = "" if rank is None else f" of rank {rank}"
            text += f"\n  last log lines{whose}:\n" + "\n".join(f"  | {line}" for line in log_tail.splitlines())
        if remedy:
            text += f"\n  remedy: {remedy}"
        super().__init__(text)


class WireError(ValueError):
    """A peer sent what the protocol does not allow."""
