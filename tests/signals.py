"""Give the processes that tests start the default signals.

A background shell ignores SIGINT and SIGQUIT, nohup ignores SIGHUP, and an ignored signal stays ignored through exec: a
child would never see the signal that a test sends it. A caught signal, however, gets its default through exec. So a
process that ignores a signal catches it and does nothing instead: for the process itself that is the same."""

import signal

NUMBERS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


def give_children_defaults() -> None:
    for number in NUMBERS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
