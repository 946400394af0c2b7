"""Files of other versions: a newer minor one is read, a newer major one refused with a sentence. When this fails, an
upgrade of one machine stops all others with a traceback."""

from __future__ import annotations

import json

import pytest

from phalanx.checkpoint.index import CATALOG, Index
from phalanx.core.checkpoint import Entry, Manifest
from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.core.store import ObjectStore
from phalanx.data.fetch import read_manifest
from phalanx.data.selection import RunData
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


def test_a_newer_major_version_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(UserError, match="format = 7: the manifest is newer than this program, which reads 1"):
        Manifest.from_json(json.dumps(manifest_body(format=7)[1]).encode())
    store = ObjectStore(f"memory://{tmp_path.name}-new")
    store.write(CATALOG, json.dumps({"format": 2, "checkpoints": 5}).encode())
    with pytest.raises(UserError, match="newer than this program"):
        Index(store).names()
    data = Memory()
    write_set(data, [("a", ramp(100))])
    head = data.read("manifest.jsonl").replace(b'"phalanx_manifest": 2', b'"phalanx_manifest": 9')
    data.write("manifest.jsonl", head)
    with pytest.raises(UserError, match="newer than this program"):
        read_manifest(data)


def test_data_sets_of_the_first_format_are_still_read():
    """Their shards have names without a root."""
    manifest, _ = write_set(Memory(), [("a", ramp(100))])
    old = manifest.encode().replace(b'"phalanx_manifest": 2', b'"phalanx_manifest": 1')
    from phalanx.core.manifest import Manifest as DataManifest

    assert DataManifest.decode(old).shard_name(0, 1) == "shards/a-000-000001.shard"
    assert DataManifest.decode(old).encode() == old
