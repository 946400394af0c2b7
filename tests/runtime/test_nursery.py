"""Nodes of one machine that are forked from one process: they import nothing themselves, and behave as others do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.control.policy import Policy
from phalanx.runtime import kernel
from tests.runtime.cluster import QUICK, S, has_ended, kill, wait_for
from tests.runtime.conftest import alive_with

COUNTED = """
import os
with open(os.path.join(os.path.dirname(__file__), "imports"), "a") as file:
    file.write("once ")
"""


def parent_of(pid: int) -> int:
    return kernel.stat(pid)[1]


def imports(folder: Path) -> int:
    return (folder / "imports").read_text().count("once")


def test_what_ranks_need_is_imported_once_for_all_nodes(cluster, tmp_path, monkeypatch):
    (tmp_path / "counted.py").write_text(COUNTED)
    monkeypatch.syspath_prepend(tmp_path)
    c = cluster(policy=Policy(**{**QUICK, "wait_ns": 60 * S}))
    c.prepare("counted")
    for name in "abc":
        c.start_node(name)
    c.running(1)
    assert imports(tmp_path) == 1
    lost = c.facts()[0]["node"]  # which of the three is the spare depends on who joined first
    kill(c.nodes[lost].pid)
    wait_for(lambda: has_ended(c.nodes[lost]))
    c.nodes.pop(lost).close()
    c.start_node(lost)
    c.running(2)
    assert imports(tmp_path) == 1, "a node that is started again imports nothing"
    workers = c.pids()
    zygotes = {parent_of(pid) for pid in workers.values()}
    assert {parent_of(pid) for pid in zygotes} <= {node.pid for node in c.nodes.values()}, "each node has its own"
    titles = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in zygotes}
    assert titles == {"phalanx zygote"}


def test_a_node_that_is_killed_takes_all_its_processes_along_and_that_is_proven(cluster):
    c = cluster()
    c.prepare()
    c.start_node("a")
    c.start_node("b")
    c.running(1)
    lost = c.facts()[0]["node"]
    node, pids = c.nodes[lost], [f["pid"] for f in c.facts().values() if f["node"] == lost]
    pids += [pid for s in ("store", "data", "keeper") for pid in c.service_pids(lost, s)]
    kill(node.pid)
    wait_for(lambda: has_ended(node))
    assert node.how_it_ended() == "was killed by SIGKILL"
    assert node.close(), "the last of its processes is known to be gone"
    # A process that is dying closes its files a moment before the kernel calls it a zombie.
    wait_for(lambda: all(kernel.stat(pid)[0] in ("", "Z") for pid in pids))


def test_nodes_outlive_what_they_were_forked_from_and_others_start_without_it(cluster):
    c = cluster()
    c.prepare()
    node = c.start_node("a")
    nursery = parent_of(node.pid)
    kill(nursery)
    wait_for(lambda: kernel.stat(nursery)[0] in ("", "Z"))
    started = c.start_node("b")
    assert parent_of(started.pid) == os.getpid(), "it imports by itself"
    c.running(1)
    assert not has_ended(node)
    os.kill(node.pid, signal.SIGTERM)
    wait_for(lambda: has_ended(node))
    assert node.how_it_ended().startswith("ended with code 1: "), "it says so itself"
    assert node.close() and not node.was_refused()


def test_a_node_ends_when_it_is_let_go_and_its_code_is_known(cluster):
    c = cluster("b")
    c.prepare()
    node = c.start_node("a")
    c.running(1)
    node.let_go()
    wait_for(lambda: has_ended(node))
    assert node.how_it_ended() == "ended with code 0" and node.close()


def test_when_an_import_fails_each_node_imports_by_itself_and_can_say_so(cluster):
    c = cluster()
    c.prepare("not_there_at_all")
    assert parent_of(c.start_node("a").pid) == os.getpid()


def test_nothing_stays_behind(cluster):
    c = cluster()
    c.prepare()
    c.start_node("a")
    c.start_node("b")
    c.running(1)
    assert len(alive_with(f"{c.session}-all-")) > 8
    for node in c.nodes.values():
        node.close()
    c.adapter.close()
    assert alive_with(f"{c.session}-all-") == {}


@pytest.mark.parametrize(
    ("start", "title"),
    [
        ({"entry": "phalanx.train.worker:main", "args": {"rank": 3}}, "phalanx rank 3"),
        ({"entry": "phalanx.checkpoint.keeper:main", "args": {}}, "phalanx keeper"),
        ({"entry": "phalanx.data.service:main", "args": {}}, "phalanx data"),
    ],
)
def test_ps_and_top_tell_what_a_process_is(start, title):
    """A process of its own takes the title, and reads how the kernel then shows it."""
    code = (
        "import json, sys; from phalanx.runtime.forked import _title, take_title; take_title(_title(json.loads("
        "sys.argv[1]))); print(open('/proc/self/comm').read().strip(), open('/proc/self/cmdline').read(), sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(start)], capture_output=True, text=True, check=True)
    comm, arguments = done.stdout.split("|")
    assert comm == title[:15] and arguments.rstrip("\0\n") == title
