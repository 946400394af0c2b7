"""The state that all parts of the gang share: its phase, the time, its timers, and the commands to send."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control import messages
from phalanx.control.messages import Command


@dataclass
class Desk:
    phase: str = "gathering"
    now_ns: int = 0
    timers: dict[str, int] = field(default_factory=dict)
    said: str = ""  # why nothing is done
    said_ns: int = -1  # since when

    def __post_init__(self) -> None:
        self.out: list[Command] = []

    def say(self, command: Command) -> None:
        self.out.append(command)

    def set(self, timer: str, after_ns: int) -> None:
        self.timers[timer] = self.now_ns + after_ns
        self.say(messages.SetTimer(timer, self.timers[timer]))

    def look_after(self, for_ns: int) -> None:
        """Have the gang look at its state after a while, unless it will do so sooner."""
        if not self.now_ns < self.timers.get("again", 0) <= self.now_ns + for_ns:
            self.set("again", for_ns)

    def drop(self, *timers: str) -> None:
        for timer in timers:
            self.timers.pop(timer, None)

    def due(self, timer: str) -> bool:
        """Return whether a timer fires now, and remove it if it does. A timer that was put off, or dropped, does not
        fire."""
        if self.timers.get(timer, self.now_ns + 1) > self.now_ns:
            return False
        del self.timers[timer]
        return True

    def hold(self, text: str) -> None:
        """Report why nothing is done, once for each reason."""
        if self.said_ns < 0:
            self.said_ns = self.now_ns
        if text != self.said:
            self.said = text
            self.say(messages.Note(6, text))

    def resume(self) -> None:
        self.drop("hold")
        self.said, self.said_ns = "", -1
