"""Files of other versions: a newer minor one is read, a newer major one refused with a sentence. When this fails, an
upgrade of one machine stops all others with a traceback."""

from __future__ import annotations

import json

import pytest

from phalanx.checkpoint.best import FILE as BEST
from phalanx.checkpoint.best import Best
from phalanx.checkpoint.index import CATALOG, Index
from phalanx.core import lease
from phalanx.core.checkpoint import Entry, Manifest
from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.core.store import Folder, ObjectStore
from phalanx.data.fetch import read_manifest
from phalanx.data.selection import RunData
from phalanx.observe.story import _layout
from tests.data.sets import Memory, ramp, write_set


def manifest_body(**more):
    made = Manifest(
        "step-000000001-aa", 1, Layout(tp=2), [Entry(Held("w", (4, 2)), "float32")], [(1, "a"), (1, "b")], 1
    )
    body = json.loads(made.to_json())
    return made, {**body, **more}


def test_keys_that_are_not_known_are_ignored(tmp_path):
    made, body = manifest_body(colour="blue")
    body["layout"]["hyper"] = 3
    assert Manifest.from_json(json.dumps(body).encode()) == made
    job = Job().to_dict()
    job["train"]["hyper"] = job["hyper"] = 1
    assert Job.from_dict(job) == Job()
    data = {"url": "", "version": "", "order": {}, "seq_len": 1, "global_batch": 1, "micro_batch": 1, "max_id": None}
    data |= {"buffer_steps": 1, "cache_dir": "", "cache_gb": 1.0, "quarantine_limit": 1, "hyper": 1}
    (tmp_path / "data.json").write_text(json.dumps(data))
    assert RunData.read(tmp_path).first_step == 0
    store = ObjectStore(f"memory://{tmp_path.name}")
    store.write(CATALOG, json.dumps({"format": 1, "checkpoints": {}, "hyper": 1}).encode())
    assert Index(store).names() == {}
    store.write(BEST, json.dumps({"lineage": "a", "step": 5, "loss": 1.5, "hyper": 1}).encode())
    assert Best.read(store) == Best("a", step=5, loss=1.5)
    store.write("owner.json", json.dumps({"format": 1, "run": "one", "hyper": 1}).encode())
    assert lease.read(store, "owner.json")["run"] == "one"
    assert _layout({"tp": 2, "hyper": 3}) == Layout(tp=2)


def test_what_is_written_says_its_version(tmp_path):
    store = Folder(tmp_path)
    Best("a").write(store)
    held = lease.Lease(store, "owner.json", {})
    held.take()
    held.close()
    RunData("", "", {}, 1, 1, 1, None, 1, "", 1.0, 1).write(tmp_path)
    for name in (BEST, "owner.json", "data.json"):
        assert json.loads(store.read(name))["format"] == 1


def test_a_newer_major_version_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match="format = 7: the manifest is newer than this program, which reads 1"):
        Manifest.from_json(json.dumps(manifest_body(format=7)[1]).encode())
    store = ObjectStore(f"memory://{tmp_path.name}-new")
    store.write(CATALOG, json.dumps({"format": 2, "checkpoints": 5}).encode())
    with pytest.raises(UserError, match="newer than this program"):
        Index(store).names()
    store.write(BEST, b'{"format": 2, "best": "of all"}')
    with pytest.raises(UserError, match=r"best\.json is newer than this program, which reads 1"):
        Best.read(store)
    (tmp_path / "data.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match=r"data\.json is newer than this program, which reads 1"):
        RunData.read(tmp_path)
    data = Memory()
    write_set(data, [("a", ramp(100))])
    head = data.read("manifest.jsonl").replace(b'"phalanx_manifest": 2', b'"phalanx_manifest": 9')
    data.write("manifest.jsonl", head)
    with pytest.raises(UserError, match="newer than this program"):
        read_manifest(data)


def test_a_lease_of_a_newer_version_is_left_alone(tmp_path):
    store, newer = Folder(tmp_path), b'{"format": 2, "held": false}'
    mine = lease.Lease(store, "owner.json", {})
    mine.take()
    store.write("owner.json", newer)
    mine._renew()
    assert mine.is_lost
    mine.close()
    with pytest.raises(UserError, match=r"owner\.json is newer than this program, which reads 1"):
        lease.Lease(store, "owner.json", {}).take()
    assert store.read("owner.json") == newer


def test_data_sets_of_the_first_format_are_still_read():
    """Their shards have names without a root."""
    manifest, _ = write_set(Memory(), [("a", ramp(100))])
    old = manifest.encode().replace(b'"phalanx_manifest": 2', b'"phalanx_manifest": 1')
    from phalanx.core.manifest import Manifest as DataManifest

    assert DataManifest.decode(old).shard_name(0, 1) == "shards/a-000-000001.shard"
    assert DataManifest.decode(old).encode() == old
