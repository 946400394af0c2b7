"""The fault injector's view of a run. A process that it takes for dead gets no more faults."""

import json

from phalanx.chaos.campaign import Fault, _follow
from phalanx.chaos.scene import Scene


def scene_of(tmp_path, *whats):
    events = [{"time": 1.0, "type": "node", "node": "controller", "what": "started", "pid": 7}]
    events += [{"time": 2.0, "type": "node", "node": "controller", "what": what} for what in whats]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    scene = Scene(tmp_path, tmp_path / "door", None, 1.0)
    scene.look()
    return scene


def test_a_controller_that_waits_for_its_disk_is_alive(tmp_path):
    scene = scene_of(tmp_path, "the journal cannot be opened or written: disk I/O error", "can write again")
    assert scene.agents == {"controller": 7}


def test_a_controller_that_died_is_gone(tmp_path):
    assert scene_of(tmp_path, "died (-9)").agents == {}
    assert scene_of(tmp_path, "is silent for 10 s, and is ended").agents == {}


def test_a_recovery_is_over_whoever_reports_it_first():
    """Otherwise the injector waits two minutes for a commit that it has seen, and most faults find no time."""
    fault = Fault("node", 5, at=1.0, generation=3)
    form = {"type": "control form", "generation": 4, "reason": "", "rung": 2}
    words = [form, {"type": "first commit", "generation": 4}, {"type": "control started", "generation": 4}]
    for at, event in enumerate(words):
        _follow(fault, {**event, "time": 2.0 + at})
    assert fault.committed == 3.0 and fault.started == 3.0
