"""Every command's help has one spelling of placeholders: what the user writes, in capitals or as it is typed."""

import re

from typer.main import get_command

from phalanx.cli.commands import app


def params(command, path):
    for param in command.params:
        yield path, param
    for name, inner in getattr(command, "commands", {}).items():
        yield from params(inner, f"{path} {name}")


def test_every_argument_and_option_with_a_value_has_a_placeholder():
    """Without one typer shows the type, as `<int range>`, or the name in Python, as `{run}`."""
    seen = 0
    for path, param in params(get_command(app), "phalanx"):
        if getattr(param, "is_flag", False) or "--help" in param.opts:
            continue
        seen += 1
        assert param.metavar, f"{path}: {param.opts}"
        assert not re.search(r"[<{]", param.metavar), f"{path}: {param.metavar}"
    assert seen > 100
