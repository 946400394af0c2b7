import subprocess
import sys

CHILD = "import signal; print(*(signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3, 15)))"
PARENT = f"""
import subprocess, sys
from tests.signals import give_children_defaults
give_children_defaults()
subprocess.run([sys.executable, "-c", {CHILD!r}])
"""


def test_children_of_a_background_shell_get_the_default_signals():
    """Otherwise tests that send SIGINT or SIGHUP hang in a background shell and under nohup."""
    ignoring = ["bash", "-c", "trap '' HUP INT QUIT TERM; exec \"$@\"", "bash", sys.executable, "-c"]

    def said(code: str) -> str:
        return subprocess.run([*ignoring, code], capture_output=True, text=True, check=True).stdout.strip()

    assert said(CHILD) == "True True True True"
    assert said(PARENT) == "False False False False"
