"""Whatever a user writes, the answer is a job or one UserError that says where, what and what instead."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.spec import from_mapping, load
from phalanx.spec.describe import fields


def refusal(*sets: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load(None, list(sets))
    return caught.value


@pytest.mark.parametrize(
    "setting, field, value, told",
    [
        ("train.lr=1e-3", "train.lr", 1e-3, "did you mean optimizer.lr?"),
        ("train.stpes=3", "train.stpes", 3, "did you mean train.steps?"),
        ("model.layers=3", "model.layers", 3, "model.num_layers"),
        ("model.seed=3", "model.seed", 3, "seed (above the first section)"),
        ("optimizer.qqq=3", "optimizer.qqq", 3, "The fields of [optimizer] are lr, beta1"),
        ("tp=4", "tp", 4, "did you mean layout.tp?"),
        ("optimiser.lr=1", "optimiser", {"lr": 1}, "did you mean [optimizer]?"),
        ("cluster.tp=2", "cluster", {"tp": 2}, "did you mean layout.tp?"),
        ("zzz.zzz=2", "zzz", {"zzz": 2}, "The sections are model, layout"),
        ("train=3", "train", 3, "[train] is a section"),
        ('run.networks=["10.77.1.3/24"]', "run.networks", ["10.77.1.3/24"], 'write it as "10.77.1.0/24"'),
        ("train.steps=abc", "train.steps", "abc", "Give an integer >= 1"),
        ("train.steps=true", "train.steps", True, "Give an integer >= 1"),
        ("train.steps=2.0", "train.steps", 2.0, "Give an integer >= 1"),
        ('train.steps="8"', "train.steps", "8", "Give an integer >= 1"),
        ("train.steps=0", "train.steps", 0, "must be greater than or equal to 1"),
        ("train.steps={}", "train.steps", {}, "Give an integer >= 1"),
        ("train.steps={a=1}", "train.steps", {"a": 1}, "Give an integer >= 1"),
        ("layout.zero=4", "layout.zero", 4, "Give an integer >= 1 and <= 3"),
        ("optimizer.beta1=1.0", "optimizer.beta1", 1.0, "Give a number >= 0 and < 1"),
        ("optimizer.lr=inf", "optimizer.lr", float("inf"), "finite"),
        ("train.document_mask=True", "train.document_mask", "True", "Give true or false"),
        ("name=3", "name", 3, "Give text in quotes"),
        ("name=a/b", "name", "a/b", "Give text in quotes matching"),
        ("train.precision=pf32", "train.precision", "pf32", "did you mean fp32?"),
        ("model.preset=llama3-8", "model.preset", "llama3-8", "did you mean llama3-8b"),
        ("model.preset=3", "model.preset", 3, 'Give one of "tiny"'),
        ("model.family=dens", "model.family", "dens", "did you mean dense?"),
        ("model.family=images", "model.family", "images", "did you mean image?"),
        ("model.family=x.py", "model.family", "x.py", "no NAME"),
        ("model.family=x.py:", "model.family", "x.py:", "no NAME"),
        ("model.family=none/{x}.py:F", "model.family", "none/{x}.py:F", "there is no file"),
        ("model.options.day=2020-01-01", "model.options.day", None, "Give a table of text, numbers"),
        ("data.source=python-stdlb", "data.source", "python-stdlb", "did you mean python-stdlib?"),
        ("data.source=synthetic-image", "data.source", "synthetic-image", "did you mean synthetic-images?"),
        ("data.source=~nobody/x", "data.source", "~nobody/x", "there is no file or folder"),
        ("train.steps", "--set", "train.steps", "write section.field=value"),
        ("=3", "--set", "=3", "write section.field=value"),
        ("train..steps=3", "--set", "train..steps=3", "write section.field=value"),
    ],
)
def test_the_message_names_field_value_and_remedy(setting, field, value, told):
    error = refusal(setting)
    assert error.field == field and error.remedy
    assert value is None or (error.value == value and type(error.value) is type(value))
    assert told in str(error)


def test_all_wrong_fields_are_told_at_once_with_their_lines(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 0\nlr = 1\n\n[layout]\ntp = 'two'\n")
    with pytest.raises(UserError) as caught:
        load(path, ["seed=-1"])
    text = str(caught.value)
    assert text.startswith("4 fields are wrong")
    for part in (f"{path}:2", f"{path}:3", f"{path}:6", "optimizer.lr", "'two'", "seed = -1", "(--set)"):
        assert part in text
    assert text.count("remedy:") == 4


def unreadable(folder: Path, monkeypatch) -> Path:
    def denied(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    return folder / "job.toml"


@pytest.mark.parametrize(
    "content, told",
    [
        (None, "No such file"),
        (b"[train]\nsteps = \n", "line 2, column 9"),
        (b"steps = 1\nsteps = 2\n", "line 2"),
        (b"name = '\xff'\n", "utf-8"),
        (b"x = " + b"[" * 5000, "not a TOML file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, told):
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=told) as caught:
        load(path)
    assert caught.value.value == str(path) and caught.value.remedy


def test_a_missing_file_suggests_its_neighbours(tmp_path):
    (tmp_path / "llama.toml").touch()
    for path in (tmp_path / "lama.toml", tmp_path):
        with pytest.raises(UserError, match=r"remedy: .* has llama\.toml"):
            load(path)


def test_an_unreadable_file(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="Permission denied"):
        load(unreadable(tmp_path, monkeypatch))


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
    assert load(path).job.seed == 3


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.lists(st.integers())
TABLES = st.recursive(LEAVES, lambda inner: st.dictionaries(st.text(), inner), max_leaves=5)
NAMES = st.sampled_from(sorted(fields())) | st.text()


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(NAMES, TABLES), max_size=4))
def test_no_mapping_gets_past_as_another_exception(items):
    job: dict = {}
    for name, value in items:
        section, _, leaf = name.partition(".")
        table = job.setdefault(section, {}) if leaf else job
        if isinstance(table, dict):
            table[leaf or section] = value
    try:
        from_mapping(job)
    except UserError as error:
        assert str(error)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(NAMES, st.text()).map("=".join) | st.text(), max_size=3))
def test_no_setting_gets_past_as_another_exception(sets):
    try:
        load(None, sets)
    except UserError as error:
        assert str(error)
