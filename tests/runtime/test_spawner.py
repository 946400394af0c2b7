"""Workers through a real zygote: what they are given, and what they report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.runtime.bare import BareClient
from tests.runtime.cluster import wait_for
from tests.runtime.conftest import WORKERS, Tree, wait_gone


def test_messages_go_both_ways_also_large_ones(tree):
    tree.spawn(0, "echo", a=1)
    tree.spawn(7, "echo", a=2)
    assert tree.client.events(60)["type"] == "started"
    assert tree.until("message", 7)["body"] == {"hello": {"a": 2}}
    tree.client.send(7, {"text": "x" * 3_000_000, "nan": float("inf")})  # many times a socket's buffer
    assert tree.until("message", 7)["body"]["echo"] == {"text": "x" * 3_000_000, "nan": float("inf")}
    assert tree.client.events(0.05) is None


def test_worker_process_is_clean(tree):
    tree.spawn(0, "facts")
    facts = tree.until("message")["body"]
    assert facts["session"] == tree.client.session
    assert facts["group"] and facts["sigint_ignored"] and facts["threads"] == 1
    assert list(dict.fromkeys(facts["path"])) == list(dict.fromkeys(p or os.getcwd() for p in sys.path))
    assert facts["fds"] == ["/memfd", "pipe", "socket"], "more than board, lifeline and channel: leaked by the zygote"
    assert tree.until("exit")["code"] == 0
    assert tree.log(0).read_text() == "a line without its end"


def test_an_exception_is_told_and_logged(tree):
    tree.spawn(0, "fail", text="bad luck")
    assert tree.until("message")["body"] == {"type": "error", "kind": "ValueError", "text": "bad luck"}
    end, log = tree.until("exit"), tree.log(0).read_text()
    assert end["code"] == 1 and end["tail"] == log.strip()
    assert "Traceback" in log and "in fail" in log and log.endswith("ValueError: bad luck\n")
    tree.spawn(1, "fail", text="x" * 100_000)
    assert tree.until("exit")["tail"] == "x" * 4000, "thousands may fail at once, and one message tells of many"


def test_an_entry_that_does_not_exist_is_told(tree):
    tree.client.spawn(0, "tests.runtime.nowhere:f", {}, tree.log(0))
    assert tree.until("message")["body"]["kind"] == "ModuleNotFoundError"


def test_a_worker_may_be_ended_by_a_signal_without_a_name(tree):
    tree.spawn(1, "echo")
    number = int(signal.SIGRTMIN) + 5
    tree.until("message", 1)
    os.kill(tree.pids[1], number)
    assert tree.until("exit", 1)["signal"] == f"signal {number}"
    tree.spawn(2, "echo")
    assert tree.until("started", 2), "the node lives"


@pytest.mark.parametrize(
    "function, args, code, signal_name",
    [
        ("leave", {"code": 5}, 5, None),
        ("leave", {"code": "goodbye"}, 1, None),
        ("die", {"signal": "SIGKILL"}, None, "SIGKILL"),
        ("die", {"signal": "SIGSEGV"}, None, "SIGSEGV"),
    ],
)
def test_exit_says_how_and_comes_after_the_last_words(tree, function, args, code, signal_name):
    tree.spawn(0, function, **args)
    tree.client.send(0, {"never": "read"})  # what a worker leaves unread must not cost its last words
    events = tree.all_until("exit")
    assert [e["type"] for e in events] == ["started", "message", "exit"]
    assert (events[-1]["code"], events[-1]["signal"]) == (code, signal_name)
    log = tree.log(0).read_text()
    assert ("Fatal Python error: Segmentation fault" in log) == (signal_name == "SIGSEGV")
    assert ("goodbye" in log) == (args.get("code") == "goodbye")


def test_a_worker_is_respawned_under_its_number_with_a_fresh_record(tree):
    for _ in range(2):
        tree.spawn(0, "stand", how="wait", moves=3)
        tree.until("message")
        tree.spawn(0, "echo")
        assert tree.until("message")["body"] == {"refused": "worker 0 is running"}
        tree.client.kill(0)
        assert tree.until("exit")["progress"] == {"phase": "forward", "step": 3, "micro": 0, "counter": 3}


def test_kill_before_the_fork_and_kill_takes_the_grandchildren(tree):
    tree.spawn(0, "with_child")
    tree.client.kill(0)
    assert tree.until("exit")["signal"] == "SIGKILL"
    tree.spawn(0, "with_child")
    child = tree.until("message")["body"]["child"]
    os.kill(tree.pids[0], signal.SIGKILL)  # not through the node: it must clean up all the same
    tree.until("exit")
    wait_for(lambda: not os.path.exists(f"/proc/{child}"))


def test_a_slow_client_holds_the_talker_back_and_loses_nothing(tree):
    """60 MB are unread. The node keeps a part and lets the talker wait; it still obeys, and hears of deaths."""
    tree.spawn(0, "flood", messages=60, bytes=1_000_000)
    time.sleep(1.0)
    tree.spawn(1, "leave", code=0)
    time.sleep(0.5)
    events = [tree.until("started")]
    assert Path(f"/proc/{tree.pids[0]}").exists(), "all 60 MB went into the node's memory"
    events += tree.all_until("exit")
    events += tree.all_until("exit")
    assert [e["body"]["i"] for e in events if e["type"] == "message" and e["worker"] == 0] == list(range(60))
    assert [e["type"] for e in events if e["worker"] == 1] == ["started", "message", "exit"]


def test_a_deaf_worker_is_given_up_and_a_garbling_one_too(tree):
    tree.spawn(0, "deaf")
    tree.spawn(1, "garble")
    assert "malformed message" in tree.until("exit", 1)["error"]
    for _ in range(5):
        tree.client.send(0, {"pad": "x" * (30 << 20)})
    event = tree.until("exit", 0)
    assert "unread" in event["error"] and event["signal"] == "SIGKILL"


def test_the_limit_is_refused_where_it_is_broken(tree):
    tree.spawn(0, "echo")
    with pytest.raises(ValueError, match="over the limit"):
        tree.client.send(0, {"pad": "x" * (65 << 20)})
    tree.client.send(0, {"still": "fine"})
    tree.until("message")
    assert tree.until("message")["body"] == {"echo": {"still": "fine"}}


def test_a_preload_that_fails_is_the_reason(tmp_path):
    with BareClient(["tests.runtime.not_there"], log=tmp_path / "node.log") as client:
        reason = Tree(client, tmp_path).until("node_lost")["reason"]
        assert "No module named 'tests.runtime.not_there'" in reason
        assert "not_there" in (tmp_path / "node.log").read_text()


def test_a_preloaded_function_is_called_once_for_all_workers(tmp_path, monkeypatch):
    (tmp_path / "once.py").write_text(
        "import os\nat = 0\ndef prepare():\n    global at\n    at = os.getpid()\n"
        "def tell(channel, args):\n    channel.send({'prepared': at, 'me': os.getpid()})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with BareClient(["once:prepare"], log=tmp_path / "node.log") as client:
        tree, told = Tree(client, tmp_path), []
        for worker in (0, 1):
            client.spawn(worker, "once:tell", {}, tree.log(worker))
            told.append(tree.until("message", worker)["body"])
    assert told[0]["prepared"] == told[1]["prepared"] not in (0, told[0]["me"], told[1]["me"])


def test_a_preload_that_starts_threads_is_refused(tmp_path, monkeypatch):
    (tmp_path / "threaded.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with BareClient(["threaded"], log=tmp_path / "node.log") as client:
        assert "started 1 threads" in Tree(client, tmp_path).until("node_lost")["reason"]
    assert wait_gone(client.session) == {}


def test_the_environment_is_passed_and_close_can_be_repeated(tmp_path):
    client = BareClient([WORKERS], env={"PHALANX_TEST_ONLY": "yes"}, log=tmp_path / "node.log")
    tree = Tree(client, tmp_path)
    tree.spawn(0, "echo")
    tree.until("message")
    assert b"PHALANX_TEST_ONLY=yes" in Path(f"/proc/{tree.pids[0]}/environ").read_bytes()
    client.close()
    client.close()
    assert wait_gone(client.session, timeout=0.0) == {}, "close returned before everything was gone"


def test_the_processes_of_the_runtime_need_no_torch_pydantic_and_numpy():
    names = ("aggregator", "bare", "cluster", "controller", "node", "zygote")
    code = f"import sys, {', '.join(f'phalanx.runtime.{name}' for name in names)}; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "pydantic", "numpy", "rich", "typer"} & {*modules}
