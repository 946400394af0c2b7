"""Provenance: the part of a run record that describes code, libraries and machine, so that the run can be repeated."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.observe.story import process_start

LIBRARIES = ("torch", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "xxhash", "blake3", "obstore")
MOST_DIFF_BYTES = 1 << 20


def provenance() -> dict[str, Any]:
    """Describe this process: command, user, machine, libraries and code."""
    return {
        "command": sys.argv,
        "folder": os.getcwd(),
        "user": _user(),
        "process": {"host": os.uname().nodename, "pid": os.getpid(), "began": process_start(os.getpid())},
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "driver": _driver(),
        "python": platform.python_version(),
        "code": code(Path(__file__).parent),
    }


def code(folder: Path) -> dict[str, Any]:
    """Return the commit of the code in `folder`, the changes since, and the untracked files."""
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return {}
    diff = _git(folder, "diff", "HEAD", "--", ".")
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard").splitlines()
    cut = {"diff_cut_from_bytes": len(diff)} if len(diff) > MOST_DIFF_BYTES else {}
    return {"commit": commit, "diff": diff[:MOST_DIFF_BYTES], **cut, "untracked": untracked}


def _git(folder: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(folder), *arguments]
        found = subprocess.run(command, capture_output=True, timeout=5, text=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout if found.returncode == 0 else ""


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have no entry for its user
        return str(os.getuid())
