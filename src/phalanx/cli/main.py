"""The `phalanx` command, from its first instruction to its exit code. A user's mistake prints one message with the
remedy and exits with 2, a failed run exits with 1, Ctrl-C and SIGTERM with 130. A traceback is always a bug in Phalanx.
The commands themselves are in `commands`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def run() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup is respected
            signal.signal(number, signal.default_int_handler)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell: `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    code: object = 0
    try:
        _command()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:
        code = leaving.code
    _flush()
    sys.exit(code)  # type: ignore[arg-type]


def _command() -> None:
    from phalanx.cli.commands import app
    from phalanx.core.errors import RunFailed, UserError

    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a path may be any bytes
    try:
        app()
    except (UserError, RunFailed) as error:
        from phalanx.observe.words import printable  # the end of a rank's log is in it

        with contextlib.suppress(OSError):
            print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _flush() -> None:
    """Drop output whose reader is gone (`| head`), about which the interpreter would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run()
