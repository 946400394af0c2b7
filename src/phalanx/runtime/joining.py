"""How an agent joins: it reports which node it is, which code it runs and what it has, and is told its incarnation and
what to serve. It asks until it is answered; a refusal that cannot change ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.gate.proof import Identity, Keys
from phalanx.runtime import kernel
from phalanx.runtime.aggregator import WELCOME
from phalanx.runtime.spawner import Stop
from phalanx.runtime.transport import Link, Loop, Session
from phalanx.runtime.wire import Message

AGAIN_S = 1.0
WAITING = "not joined yet: "  # the beginning of a log line that says why


HINTS = {
    "refused": "nobody listens there: is the controller up, and is that its port?",
    "did not answer": "does a firewall drop what comes, or is it another network's address?",
    "No route": "is the interface up? `ip route get` says which one is taken",
    "unreachable": "is the interface up? `ip route get` says which one is taken",
}


def hint(trouble: str) -> str:
    return next((f" ({text})" for sign, text in HINTS.items() if sign in trouble), "")


class Refusal(Stop):
    """The agent may not join."""


class Joiner:
    def __init__(
        self,
        loop: Loop,
        secret: Keys,
        name: str,
        addresses: list[tuple[str, int]],
        about: dict[str, Any],
        on_served: Callable[[int, Message], object],
        give_up_s: float,
        known: dict[str, int] | None = None,
    ):
        """`about`: life, version and about, as REPORTS in `runtime.aggregator` defines them."""
        self._about, self._on_served, self._said = about, on_served, ""
        self._loop, self._done = loop, False
        me = Identity("agent", name, 0)
        opened = lambda session: self._ask()  # noqa: E731
        self._link = Link(
            loop, secret, me, addresses, WELCOME, self._answered, on_open=opened, retry_s=AGAIN_S, known=known
        )
        loop.after(AGAIN_S, self._again)
        loop.after(give_up_s, self._give_up)
        self._give_up_s = give_up_s

    def _ask(self) -> None:
        about = {**self._about["about"], "clock_s": time.time()}
        self._link.tell({"type": "join", **self._about, "about": about})

    def _again(self) -> None:
        if not self._done:
            self._ask()
            self._loop.after(AGAIN_S, self._again)
            if self._link.trouble:
                self._complain(f"{WAITING}{self._link.trouble}{hint(self._link.trouble)}")

    def _complain(self, text: str) -> None:
        """Log a text, unless it is the same as the last one."""
        if text != self._said:
            kernel.complain(text)
            self._said = text

    def _answered(self, session: Session, number: int, body: Message) -> None:
        if self._done:
            return
        if body["type"] == "serve":
            self._done = True
            self._loop.after(0.0, self._link.close)
            self._on_served(body["incarnation"], body["spec"])
        elif body["final"]:
            raise Refusal(f"this node may not join: {body['reason']}")
        else:
            self._complain(f"{WAITING}{body['reason']}")

    def _give_up(self) -> None:
        if not self._done:
            why = f"{self._link.trouble}{hint(self._link.trouble)}" if self._link.trouble else ""
            why = why or self._said or "nobody answered"
            raise Refusal(f"this node could not join in {self._give_up_s:g} s: {why}")
