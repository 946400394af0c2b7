"""The dashboard's API: what it says is what the record says, it only reads, and nothing in a record or a request
makes it do anything else."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fastapi.testclient import TestClient

from phalanx.observe.story import Story
from phalanx.observe.tiles import decode
from phalanx.web.app import FILES, HEADERS, STATIC, create_app
from phalanx.web.shelf import Shelf
from tests.observe.records import SPENT, T0, Written
from tests.observe.test_story import broken

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m</script>"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run = broken(root)
    for step in range(40):
        run.record.rank_times(step, [1, {"0": 0.1, "1": 0.3 if step == 17 else 0.1}], 2)
    run.end()
    return root


@pytest.fixture(scope="module")
def name(root):
    return next(root.glob("job-*")).name


@pytest.fixture
def client(root):
    return TestClient(create_app(Shelf(root)), base_url="http://127.0.0.1:7474")


def test_every_view_says_what_the_record_says(client, root, name):
    story = Story(root / name)
    (listed,) = client.get("/api/runs").json()["runs"]
    assert listed["run"] == name and listed["incidents"] == 1 and listed["state"] == "done"
    run = client.get(f"/api/runs/{name}").json()
    assert run["goodput"] == story.goodput() and run["incident_list"][0]["verdict"] == story.incidents()[0].verdict()
    assert run["segments"][0][0] == pytest.approx(T0) and sum(1 for s in run["segments"] if s[3] < 2) >= 1
    record = client.get(f"/api/runs/{name}/record").json()
    assert record["job"] == story.part.job and record["meta"] == story.part.meta
    assert record["summary"] == story.part.summary
    series = client.get(f"/api/runs/{name}/series").json()
    assert series["series"]["loss"]["mean"] == pytest.approx([row["loss"] for row in story.rows])
    assert series["step"] == list(range(40)) and len(series["breaks"]) >= 1
    heat = client.get(f"/api/runs/{name}/heat", params={"h": 2, "w": 10}).json()
    codes = np.frombuffer(base64.b64decode(heat["codes"]), np.uint8).reshape(heat["rows"], heat["columns"])
    worst = float(np.nanmax(decode(codes)))
    assert worst == pytest.approx(1.5, rel=0.014) and heat["columns"] == 10  # of a median of two ranks
    assert heat["ends"][-1] == pytest.approx(story.rows[-1]["time"], abs=1e-3)
    assert run["phases"] == SPENT and series["series"]["phase_backward"]["mean"][-1] == SPENT["backward"]
    assert series["series"]["held_buddy"]["mean"][-1] == 32
    fleet = client.get(f"/api/runs/{name}/fleet").json()
    assert [node["name"] for node in fleet["nodes"]] == ["node-0"] and fleet["replicas"] == [[0, 2]]
    assert list(base64.b64decode(fleet["codes"])) == codes[:, -1].tolist(), "of the last steps, which were even"
    mixed = client.get(f"/api/runs/{name}/mixture").json()
    assert mixed["samples"] == {"web": 120, "code": 40} and mixed["shares"]["web"] == pytest.approx([0.75] * 40)
    one = client.get(f"/api/runs/{name}/incidents/1").json()
    assert one["kind"] == "worker" and one["evidence"][0]["signal"] == "SIGKILL"
    assert client.get("/api/diff", params={"a": name, "b": name}).json()["part"] is None
    assert client.get(f"/api/runs/{name}/logs").json()["lines"] == []


def test_a_finished_run_is_told_once_and_a_live_one_as_it_grows(tmp_path):
    from phalanx.observe.provenance import provenance

    run = Written(tmp_path, process=provenance()["process"]).begin().steps(0, 3)
    client = TestClient(create_app(Shelf(tmp_path)), base_url="http://localhost")
    url = f"/api/runs/{run.path.name}"
    assert client.get(url).json()["state"] == "running"
    shelf = Shelf(tmp_path)
    first = shelf.about(run.path.name)
    run.steps(3, 6)
    shelf.get(run.path.name).looked = 0.1  # long ago
    assert shelf.about(run.path.name)["step"] == 6 and shelf.about(run.path.name)["version"] > first["version"]
    run.end()
    with TestClient(create_app(Shelf(tmp_path)), base_url="http://localhost").stream("GET", f"{url}/live") as told:
        text = "".join(told.iter_text())
    messages = re.findall(r"^data: (.+)$", text, re.M)
    assert json.loads(messages[0])["state"] == "done" and "event: over" in text


def test_what_each_message_asks_for_has_no_diff_in_it(tmp_path):
    """A live page asks for its run at each message; the changes to the code are as they were when it began."""
    code = {"git": "abc", "diff": "+a line that was not committed\n" * 30_000}
    run = Written(tmp_path, code=code).begin().steps(0, 3).end(dropped=7)
    client = TestClient(create_app(Shelf(tmp_path)), base_url="http://localhost")
    whole = client.get(f"/api/runs/{run.name}")
    assert len(whole.content) < 100_000 and whole.json()["dropped"] == 7
    assert client.get(f"/api/runs/{run.name}/record").json()["meta"]["code"] == code


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..%2f..%2fetc",
        "/api/runs/%2e%2e",
        "/api/runs/nothing-20260101T000000Z-0000",
        "/api/runs/job/series",
        "/api/runs/%00/heat",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/index.html",
        "/docs",
        "/openapi.json",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(client, path):
    assert client.get(path).status_code == 404


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    run = Written(outside, "secret").begin().steps(0, 2).end()
    inside.mkdir()
    (inside / run.name).symlink_to(run)
    client = TestClient(create_app(Shelf(inside)), base_url="http://localhost")
    assert client.get(f"/api/runs/{run.name}").status_code == 404


def test_what_is_no_number_is_refused_and_what_is_too_much_is_cut(client, name):
    assert client.get(f"/api/runs/{name}/series", params={"points": "1e9"}).status_code == 422
    assert client.get(f"/api/runs/{name}/heat", params={"w": 10**9}).status_code == 422
    assert client.get(f"/api/runs/{name}/incidents/99").status_code == 404
    assert client.get(f"/api/runs/{name}/heat", params={"r0": 50, "r1": 2, "s0": 900, "s1": 3}).json()["rows"] == 1


def test_it_only_reads(client, name):
    for method in ("post", "put", "patch", "delete"):
        assert getattr(client, method)(f"/api/runs/{name}").status_code == 405


def test_hostile_text_stays_text(tmp_path):
    run = Written(tmp_path, HOSTILE, git=HOSTILE).begin().steps(0, 3)
    run.event("exit", rank=1, signal=HOSTILE, node=HOSTILE, service="")
    log = run.path / "logs" / "node-0"
    log.mkdir()
    (log / "rank-00000.log").write_text(f"{HOSTILE}\n")
    path = run.end(reason=HOSTILE)
    client = TestClient(create_app(Shelf(tmp_path)), base_url="http://localhost")
    for url in (
        "/api/runs",
        f"/api/runs/{path.name}",
        f"/api/runs/{path.name}/record",
        f"/api/runs/{path.name}/incidents/1",
        f"/api/runs/{path.name}/logs",
    ):
        answer = client.get(url)
        assert (
            answer.headers["content-type"] == "application/json"
            and answer.headers["x-content-type-options"] == "nosniff"
        )
        assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert HOSTILE in json.dumps(client.get(f"/api/runs/{path.name}").json(), ensure_ascii=False).replace(
        "\\u001b", "\x1b"
    )
    page = client.get(f"/runs/{path.name}/{HOSTILE.replace(chr(27), '%1b')}")
    assert page.status_code == 200 and "onerror" not in page.text


def test_the_page_needs_nothing_from_elsewhere_and_parses_no_html():
    names = {p.name for p in STATIC.iterdir()}
    assert names == {*FILES, "index.html"}
    text = "".join((STATIC / name).read_text() for name in sorted(names))
    outside = set(re.findall(r"https?://[\w./-]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside and len(text) < 300_000
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
    ):
        assert word not in text, word


def test_a_name_of_a_stranger_does_not_reach_a_server_on_loopback(root, name):
    app = create_app(Shelf(root))
    for host in ("evil.example", "127.0.0.1.evil.example:7474", ""):
        answer = TestClient(app, base_url="http://127.0.0.1").get("/api/runs", headers={"host": host})
        assert answer.status_code == 403, host
    for host in ("localhost", "localhost:7474", "127.0.0.1:9", "[::1]:7474"):
        assert (
            TestClient(app, base_url="http://127.0.0.1").get("/api/runs", headers={"host": host}).status_code == 200
        ), host


def test_elsewhere_than_on_loopback_a_token_is_needed(root, name):
    def fresh():
        return TestClient(create_app(Shelf(root), token="secret"), base_url="http://node-7:80", follow_redirects=False)

    for path in ("/", "/api/runs", f"/api/runs/{name}/live", "/metrics", "/static/main.js"):
        refused = fresh().get(path)
        assert refused.status_code == 401 and "token" in refused.json()["error"]
        assert fresh().get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert fresh().get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
    client = fresh()
    answer = client.get("/?token=secret")
    assert answer.status_code == 303 and "token" not in answer.headers["location"]
    assert (
        "httponly" in answer.headers["set-cookie"].lower() and "samesite=strict" in answer.headers["set-cookie"].lower()
    )
    assert client.get("/api/runs").status_code == 200
    assert (
        set(HEADERS) <= {k.title() for k in answer.headers} | set(HEADERS)
        and "content-security-policy" in answer.headers
    )


def test_an_empty_folder_and_a_run_without_steps_have_answers(tmp_path):
    client = TestClient(create_app(Shelf(tmp_path)), base_url="http://localhost")
    assert client.get("/api/runs").json()["runs"] == [] and client.get("/").status_code == 200
    run = Written(tmp_path)
    about = client.get(f"/api/runs/{run.path.name}").json()
    assert about["step"] == 0 and about["headline"] and not about["has_ranks"]
    assert client.get(f"/api/runs/{run.path.name}/series").json()["time"] == []
    assert client.get(f"/api/runs/{run.path.name}/heat").json()["rows"] == 0


def test_traces_and_reports_are_found_by_their_names_alone(client, root, name, tmp_path):
    folder = root / name / "traces"
    folder.mkdir(exist_ok=True)
    (folder / "3-5.json.gz").write_bytes(b"trace")
    (folder / "secret.json.gz").write_bytes(b"other")
    (root / "reports").mkdir(exist_ok=True)
    (root / "reports" / "plan.html").write_text(f"<script>alert(1)</script>{HOSTILE}")
    (tmp_path / "outside.html").write_text("outside")
    (root / "reports" / "link.html").symlink_to(tmp_path / "outside.html")
    assert [one["name"] for one in client.get(f"/api/runs/{name}/traces").json()["traces"]] == ["3-5.json.gz"]
    assert client.get(f"/api/runs/{name}/traces/3-5.json.gz").content == b"trace"
    assert [one["name"] for one in client.get("/api/reports").json()["reports"]] == ["plan.html"]
    shown = client.get("/reports/plan.html")
    policy = shown.headers["content-security-policy"]
    assert shown.status_code == 200 and policy.startswith("sandbox allow-popups;") and "script-src" not in policy
    assert "default-src 'none'" in policy and shown.headers["x-content-type-options"] == "nosniff"
    for path in (
        f"/api/runs/{name}/traces/secret.json.gz", f"/api/runs/{name}/traces/..%2Fmeta.json",
        f"/api/runs/{name}/traces/%2e%2e%2fmeta.json", "/reports/..%2F..%2Fetc%2Fpasswd", "/reports/link.html",
        "/reports/.hidden.html", f"/reports/..%2F{name}%2Fmeta.json", "/reports/none.html",
    ):  # fmt: skip
        assert client.get(path).status_code == 404, path
    assert client.post("/reports/plan.html").status_code == 405


def test_a_reader_that_knows_no_compression_is_answered(client, name):
    plain, packed = (client.get(f"/api/runs/{name}", headers={"Accept-Encoding": how}) for how in ("identity", "gzip"))
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert plain.json().keys() == packed.json().keys()


def test_many_who_look_at_one_run_are_answered_from_one_reading(root, name, monkeypatch):
    asked, real = [], Shelf.whole
    monkeypatch.setattr(Shelf, "whole", lambda self, run: asked.append(run) or real(self, run))
    shelf = Shelf(root)
    with ThreadPoolExecutor(10) as viewers:  # at once, as when a step is announced to all
        first, *others = viewers.map(lambda _: shelf.answer(name, "whole"), range(10))
    assert all(other is first for other in others) and asked == [name]
    assert shelf.answer(name, "series", 0.0, 1e12, 7) != shelf.answer(name, "series", 0.0, 1e12, 9)


@pytest.mark.parametrize(
    "file, line", [("metrics", {"step": 4, "time_s": "y"}), ("events", {"type": "checkpoint", "step": "y"})]
)
def test_a_run_that_makes_no_sense_hides_no_other(tmp_path, file, line):
    bad, good = Written(tmp_path, "bad").begin().steps(0, 4), Written(tmp_path, "good").begin().steps(0, 4).end()
    with open(bad.path / f"{file}.jsonl", "a") as out:
        out.write(json.dumps({"time": bad.now, **line}) + "\n")
    client = TestClient(create_app(Shelf(tmp_path)), base_url="http://localhost")
    found = {run["run"]: run for run in client.get("/api/runs").json()["runs"]}
    assert found[good.name]["step"] == 4
    one = found[bad.path.name]
    assert one["state"] == "unreadable" and one["headline"].startswith("Cannot be read: ") and one["began"] > 1e9
    scraped = client.get("/metrics")
    assert scraped.status_code == 200 and f'phalanx_step{{job="good",run="{good.name}"}} 4.0' in scraped.text


def test_a_line_whose_time_is_no_number_is_passed_over_and_counted(tmp_path):
    run = Written(tmp_path).begin().steps(0, 4)
    for file, line in (("metrics", {"step": 4}), ("events", {"type": "first commit", "generation": 1})):
        with open(run.path / f"{file}.jsonl", "a") as out:
            out.writelines(json.dumps({"time": time, **line}) + "\n" for time in ("y", [1], math.nan))
    (about,) = Shelf(tmp_path).runs()
    assert about["step"] == 4 and about["damaged_lines"] == 6


def test_runs_that_are_lost_are_read_once(tmp_path, monkeypatch):
    gone = {"host": os.uname().nodename, "pid": os.getpid(), "began": "long ago"}
    runs = [Written(tmp_path, f"job-{number}", process=gone).begin().steps(0, 4) for number in range(3)]
    monkeypatch.setattr("phalanx.web.shelf.MOST_OPEN", 1)
    shelf, read = Shelf(tmp_path), []
    monkeypatch.setattr("phalanx.web.shelf.Story", lambda path, price: read.append(path.name) or Story(path, price))
    assert {about["state"] for about in shelf.runs()} == {"lost"} and len(read) == 3
    assert len(shelf.runs()) == 3 and len(read) == 3
    runs[0].steps(4, 6)
    assert sorted(about["step"] for about in shelf.runs()) == [4, 4, 6] and len(read) == 4


def test_a_run_that_takes_long_to_read_keeps_nobody_waiting_for_another(tmp_path, monkeypatch):
    long, short = (Written(tmp_path, name).begin().steps(0, 4).end().name for name in ("long", "short"))
    begun, go_on = threading.Event(), threading.Event()

    def story(path, price):
        if path.name == long:
            begun.set()
            assert go_on.wait(60)
        return Story(path, price)

    monkeypatch.setattr("phalanx.web.shelf.Story", story)
    shelf = Shelf(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(shelf.about, long)
        assert begun.wait(60)
        try:
            assert pool.submit(shelf.about, short).result(20)["step"] == 4
            assert not slow.done()
        finally:
            go_on.set()
        assert slow.result()["step"] == 4
