"""What a run reads of a data set for its job, in which order, and which jobs do not fit."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.core.job import DataConfig, Job, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.core.manifest import Field
from phalanx.core.shape import ModelConfig
from phalanx.data.build import build, write_records
from phalanx.data.order import Order
from phalanx.data.samples import digest, unpack
from phalanx.data.selection import RunData, unigram_entropy
from phalanx.data.source import prepare
from phalanx.data.tokenizer import Bytes
from tests.data.sets import flip

SEQ = 16


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Build a data set, and return its versions before and after it was added to."""
    root = tmp_path_factory.mktemp("grown")
    versions = []
    for label in ("web", "code"):
        (root / label).mkdir()
        text = bytes([ord(label[0])]) * 9_000
        (root / label / "a.txt").write_bytes(text)
        inputs = [(label, str(root / label))]
        append = bool(versions)
        sizes = {} if append else {"chunk_items": 128, "shard_chunks": 8}
        versions.append(build(inputs, root / "set", Bytes(), workers=1, append=append, **sizes)[1])
    return root / "set", versions


def job(url, layout=None, **data):
    train = TrainConfig(seq_len=SEQ, global_batch=8, micro_batch=2)
    return Job(train=train, layout=layout or Layout(), data=DataConfig(source=str(url), **data))


def letters(data, places):
    loader = data.open()
    rows = loader.rows(places)
    loader.close()
    return ["".join(map(chr, sorted(set(row.tolist()) - {256}))) for row in rows]


def test_what_was_served_stays_when_the_data_grows(grown):
    url, (old, new) = grown
    before = RunData.plan(job(url, version=old), str(url))
    stages = [
        {"at": 0, "weights": {}, "version": old},
        {"at": 200, "weights": {"web": 0.5, "code": 0.5}, "version": ""},
    ]
    after = RunData.plan(job(url, stages=stages), str(url))
    assert (before.version, after.version) == (old, new)
    assert letters(before, range(200)) == letters(after, range(200)) == ["w"] * 200
    first, second = (Order.from_dict(d.order) for d in (before, after))
    assert all(
        np.array_equal(a, b) for a, b in zip(first.locate(np.arange(200)), second.locate(np.arange(200)), strict=True)
    )
    later = letters(after, range(200, 800))
    assert 250 < later.count("c") < 350 and later.count("w") + later.count("c") == 600
    streams, samples = second.locate(np.arange(800))
    assert np.bincount(samples[streams == 0]).max() == 1  # web continues where it was: nothing twice


def test_a_version_may_be_given_as_it_is_printed(grown):
    url, (old, _) = grown
    assert RunData.plan(job(url, version=old[:16]), str(url)).version == old


def test_skips_leave_out_and_keep_the_rest(grown):
    url, _ = grown
    plain, skipped = (RunData.plan(job(url, skips=s), str(url)) for s in ([], [[5, 9]]))
    a, b = (Order.from_dict(d.order).locate(np.arange(n)) for d, n in ((plain, 20), (skipped, 16)))
    keep = np.r_[0:5, 9:20]
    assert all(np.array_equal(x[keep], y) for x, y in zip(a, b, strict=True))


def test_the_order_does_not_depend_on_the_number_of_nodes(grown):
    url, _ = grown
    config = Job(train=TrainConfig(seq_len=SEQ, global_batch=80), data=DataConfig(source=str(url)))
    orders = [
        RunData.plan(replace(config, layout=Layout(replica=n, ranks_per_node=1)), str(url)).order
        for n in (1, 8, 16, 40)
    ]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize(
    "config, data, parts",
    [
        (ModelConfig(vocab_size=200), {}, ["model.vocab_size = 200", "byte tokens need", "at least 257"]),
        (ModelConfig(family="image"), {}, ["data.source", "a stream of tokens", "model.family"]),
        (ModelConfig(), {"version": "ab" * 32}, ["data.version = 'abab", "no such version", "name one of "]),
        (ModelConfig(), {"stages": [{"at": 0, "weights": {"wbe": 1.0}}]}, ["data.stages = 'wbe'", "it has web, code"]),
        (ModelConfig(), {"stages": [{"at": 0, "weights": {"web": 0.0}}]}, ["data.stages", "at least one source more"]),
        (
            ModelConfig(),
            {"stages": [{"at": 0, "weights": {}, "version": "ab" * 32}]},
            ["data.stages.0.version = 'abab", "name one of "],
        ),
        (
            ModelConfig(),
            {"stages": [{"at": 0, "weights": {"web": 1.0, "code": 1e-6}}]},
            ["data.stages", "too small", "65536"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(grown, config, data, parts):
    url, _ = grown
    with pytest.raises(UserError) as refused:
        RunData.plan(
            Job(model=config, train=TrainConfig(seq_len=SEQ), data=DataConfig(source=str(url), **data)), str(url)
        )
    assert all(part in str(refused.value) for part in parts), refused.value


def test_text_models_do_not_read_records(tmp_path):
    fields = (Field("tokens", "<f4", (4, 3)), Field("targets", "<u2"))
    batch = {"tokens": np.zeros((5, 4, 3), "<f4"), "targets": np.arange(5, dtype="<u2")}
    write_records(tmp_path / "set", "x", fields, [batch])
    with pytest.raises(UserError, match="records of"):
        RunData.plan(job(tmp_path / "set"), str(tmp_path / "set"))


def test_a_missing_data_set_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no data set"):
        RunData.plan(job(tmp_path), str(tmp_path))


def test_it_survives_the_record(grown, tmp_path):
    url, _ = grown
    made = RunData.plan(job(url), str(url))
    made.write(tmp_path)
    assert RunData.read(tmp_path) == made


def test_the_entropy_is_that_of_the_targets(grown):
    url, (old, _) = grown
    loader = RunData.plan(job(url, version=old), str(url)).open()
    assert unigram_entropy(loader, 100) == pytest.approx(0, abs=0.02)  # one letter, and an end of document
    loader.close()
    loader = RunData.plan(job(url, stages=[{"at": 0, "weights": {"web": 0.5, "code": 0.5}}]), str(url)).open()
    assert unigram_entropy(loader, 1000) == pytest.approx(math.log(2), abs=0.02)
    loader.close()


def test_unpacking_tells_documents_apart():
    rows = np.array([[5, 256, 7, 8, 256, 9], [256, 256, 1, 2, 3, 4]], "<u2")
    s = unpack(rows, 256)
    assert s.tokens_BL.tolist() == [[5, 256, 7, 8, 256], [256, 256, 1, 2, 3]]
    assert s.targets_BL.tolist() == [[256, 7, 8, 256, 9], [256, 1, 2, 3, 4]]
    assert s.weights_BL.tolist() == [[1, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert s.documents_BL.tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]


def test_the_digest_does_not_depend_on_the_split_but_on_every_bit_and_place():
    rows = np.arange(60, dtype="<u2").reshape(6, 10)
    whole = digest(rows, range(6))
    assert (digest(rows[:2], range(2)) + digest(rows[2:], range(2, 6))) % (1 << 64) == whole
    assert digest(rows[::-1], range(6)) != whole
    changed = rows.copy()
    changed[3, 3] ^= 1
    assert digest(changed, range(6)) != whole


def lines_of(config, tmp_path):
    (tmp_path / "run").mkdir(exist_ok=True)
    return prepare(config, tmp_path / "run", lambda size_bytes: None)[0].splitlines()


def test_text_that_is_read_again_is_told_with_how_often(tmp_path):
    """Otherwise a user who trains 40 epochs learns of it only from the loss."""
    (tmp_path / "text.txt").write_bytes(b"some words\n" * 300)
    config = replace(job(tmp_path / "text.txt"), run=RunConfig(dir=str(tmp_path / "runs")))

    def said(steps):
        wanted = replace(config, train=replace(config.train, steps=steps))
        told = [line for line in lines_of(wanted, tmp_path) if "by the last step" in line]
        data = RunData.read(tmp_path / "run")
        return told, Order.from_dict(data.order).epochs(data.cursor(steps))["text.txt"]

    (told, once), (again, many) = said(1), said(1000)
    assert not told and 0 < once < 1
    assert many == pytest.approx(1000 * once) and f"text.txt is read {many:,.1f} times by the last step" in again[0]


def test_text_that_is_cut_or_left_out_is_told_by_every_run(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"x" * 500_000)
    (tmp_path / "in" / "b.txt").write_bytes(b"")
    config = job(tmp_path / "in", max_mb=0.2)
    config = replace(config, run=RunConfig(dir=str(tmp_path / "runs")))
    for _ in range(2):  # the second finds what the first has built
        told = lines_of(config, tmp_path)
        assert told[1:] == [
            "data: cut by data.max_mb: the first 0.2 MB of text of in are used; its files hold 0.5 MB",
            "data: left out: 1 empty file",
        ]
    whole = replace(config, data=DataConfig(source=str(tmp_path / "in" / "a.txt"), max_mb=0.6))
    assert len(lines_of(whole, tmp_path)) == 1


def test_what_a_build_refuses_is_said_in_the_words_of_the_job(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").symlink_to("nowhere")
    config = replace(job(tmp_path / "in"), run=RunConfig(dir=str(tmp_path / "runs")))
    with pytest.raises(UserError, match=r"data\.source = '.*in': cannot read .*a\.txt: No such file"):
        lines_of(config, tmp_path)


def test_a_small_extent_is_not_served_and_told(grown, tmp_path):
    shutil.copytree(grown[0], tmp_path / "set")
    (tmp_path / "few").write_text("few")
    build([("few", str(tmp_path / "few"))], tmp_path / "set", Bytes(), workers=1, append=True)
    told = lines_of(job(tmp_path / "set"), tmp_path)
    assert told[1] == "data: not served: extent 2 (few), which holds 4 items, less than one sample"
    assert all(" is read " in line for line in told[2:])  # the others: how often they are read


def test_a_data_set_that_is_damaged_from_the_start_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 500)
    build([("a", str(tmp_path / "a.txt"))], tmp_path / "set", Bytes(), workers=1)
    flip(next((tmp_path / "set" / "shards").iterdir()), 10)
    (tmp_path / "run").mkdir()
    with pytest.raises(
        UserError, match=r"a-000-000000-\w+.shard, chunk 0.*expected xxh3.*got xxh3.*\n.*remedy: `phalanx data"
    ):
        prepare(job(tmp_path / "set"), tmp_path / "run", lambda size_bytes: None)
