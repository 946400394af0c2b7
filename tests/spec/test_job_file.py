"""A job means what its file says: where each value comes from, and which one wins."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from phalanx.core.compat import RULES
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.shape import ModelConfig
from phalanx.spec import PRESETS, explain, from_mapping, load, schema
from phalanx.spec.describe import fields

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_defaults_are_the_core_ones():
    assert from_mapping({}).job == Job()
    assert set(from_mapping({}).origins.values()) == {"default"}


def test_every_core_field_can_be_written_and_no_other():
    core = set(from_mapping({}).origins)
    assert set(fields()) == core | {"model.preset", "layout.ranks"}


def test_no_file_is_the_quickstart():
    packaged, example = load(), load(ROOT / "examples" / "quickstart.toml")
    assert packaged.job == example.job
    assert packaged.job.layout.describe() == "replica 2 x shard 1 x tp 2 = 4 ranks"
    assert packaged.origins["train.steps"].startswith("packaged quickstart.toml:")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_resolve(path):
    assert load(path).job.name == path.stem


def test_origins_and_precedence(tmp_path):
    path = write(
        tmp_path, 'seed = 5\n[model]\npreset = "llama3-8b"\nnum_layers = 2\n[optimizer]\nlr = 1e-4\nclip = 0\n'
    )
    job, origins = (resolved := load(path, ["optimizer.lr=2e-4"])).job, resolved.origins
    assert (job.seed, origins["seed"]) == (5, f"file {path}:1")
    assert (job.model.dim, origins["model.dim"]) == (4096, "preset llama3-8b")
    assert (job.model.num_layers, origins["model.num_layers"]) == (2, f"file {path}:4")
    assert (job.optimizer.lr, origins["optimizer.lr"]) == (2e-4, "--set")
    assert (job.optimizer.clip, origins["optimizer.clip"]) == (0.0, f"file {path}:7")
    assert isinstance(job.optimizer.clip, float)
    assert (job.optimizer.eps, origins["optimizer.eps"]) == (1e-8, "default")


def test_a_preset_on_the_command_line_replaces_the_file_s_model(tmp_path):
    path = write(tmp_path, '[model]\npreset = "llama3-1b"\ndim = 64\n')
    assert load(path, ["model.preset=llama3-8b"]).job.model == ModelConfig(**PRESETS["llama3-8b"])
    assert load(path, ["model.num_layers=3", "model.preset=llama3-8b"]).job.model.num_layers == 3


@pytest.mark.parametrize(
    "name, published, tolerance",
    [
        ("llama3-1b", 1.24e9, 0.02),
        ("llama3-8b", 8.03e9, 0.02),
        ("llama3-70b", 70.6e9, 0.02),
        ("llama3-405b", 405.9e9, 0.02),
        ("gpt3-175b", 175e9, 0.03),
        ("dense-1t", 1e12, 0.03),
        ("mixtral-8x7b", 46.7e9, 0.002),
        ("deepseek-v3-like", 671e9, 0.01),
    ],
)
def test_presets_have_the_published_size(name, published, tolerance):
    assert from_mapping({"model": {"preset": name}}).job.model.num_params == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("before", PRESETS)
def test_a_preset_laid_over_another_leaves_nothing_of_it(before, tmp_path):
    path = write(tmp_path, f'[model]\npreset = "{before}"\n')
    assert load(path, ["model.preset=llama3-8b"]).job.model == ModelConfig(**PRESETS["llama3-8b"])


def test_presets_are_complete_and_tiny_is_the_default():
    fields_of_shape = {field.name for field in dataclasses.fields(ModelConfig)} - {"options"}
    assert {frozenset(shape) for shape in PRESETS.values()} == {frozenset(fields_of_shape)}
    assert ModelConfig(**PRESETS["tiny"]) == ModelConfig()


def test_set_values_are_toml_or_bare_text():
    job = load(None, ["train.precision=fp64", 'name="x"', "model.tied=true", "train.steps = 1_000", "name=a"]).job
    assert (job.train.precision, job.name, job.model.tied, job.train.steps) == ("fp64", "a", True, 1000)
    assert load(None, ["layout={replica=1, ranks_per_node=0, tp=1}"]).job.layout.world_size == 1


def test_options_are_a_free_table_and_merge(tmp_path):
    (tmp_path / "mine.py").write_text("FAMILY = None\n")
    text = '[model]\nfamily = "mine.py:FAMILY"\nnum_heads = 3\n[model.options]\npatch = 8\n"a.b" = [1, "x"]\nt.u = 1\n'
    resolved = load(write(tmp_path, text), ["model.options.t.u=2", "model.options.new=yes"])
    assert resolved.job.model.options == {"patch": 8, "a.b": [1, "x"], "t": {"u": 2}, "new": "yes"}
    assert resolved.job.model.family == f"{tmp_path / 'mine.py'}:FAMILY"
    assert resolved.origins["model.options"].startswith(f"file {tmp_path / 'job.toml'}:5, ")
    assert resolved.origins["model.options"].endswith(", --set")


def test_relative_paths_start_where_they_are_written(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "text").mkdir()
    path = write(tmp_path / "jobs", '[data]\nsource = "../text"\n')
    monkeypatch.chdir(tmp_path)
    expected = str(tmp_path / "text")
    assert load(Path("jobs/job.toml")).job.data.source == expected
    assert load(path, ["data.source=text"]).job.data.source == expected
    assert from_mapping({"data": {"source": "text"}}).job.data.source == expected


def test_ranks_agree_with_the_degrees():
    assert load(None, ["layout.ranks=4"]).job.layout.world_size == 4
    with pytest.raises(UserError, match=r"layout\.ranks = 8: .*replica 2 x shard 1 x tp 2 = 4 ranks"):
        load(None, ["layout.ranks=8"])


def test_explain_has_a_row_for_every_field():
    rows = {row.field: row for row in explain(load(None, ["train.steps=50"]))}
    assert rows["train.steps"].value == 50 and rows["train.steps"].origin == "--set"
    assert rows["name"].value == "quickstart"
    assert all(row.help.endswith(".") for row in rows.values())


def test_a_layout_may_be_left_to_the_planner():
    choices = schema()["properties"]["layout"]["anyOf"]
    assert {"const": "auto"}.items() <= choices[1].items() and "$ref" in choices[0]
    assert from_mapping({"layout": "auto"}).auto and not from_mapping({"layout": {"shard": 2}}).auto


def test_schema_has_help_and_defaults():
    steps = schema()["$defs"]["TrainSection"]["properties"]["steps"]
    assert steps["default"] == Job().train.steps and steps["minimum"] == 1 and steps["description"]
    assert schema()["$defs"]["ModelSection"]["properties"]["preset"]["enum"] == list(PRESETS)


def test_spec_needs_no_torch():
    code = "import sys, phalanx.spec; phalanx.spec.explain(phalanx.spec.load()); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def values(name: str) -> st.SearchStrategy:
    """Any value in the field's range; sizes are drawn from few numbers, so that many of the jobs fit together."""
    known = fields()[name]
    if known.choices:
        return st.sampled_from(known.choices)
    if isinstance(known.default, bool):
        return st.booleans()
    if isinstance(known.default, float):
        return st.floats(0.001, 0.999)
    if isinstance(known.default, int):
        return st.integers(1, 3) if name == "layout.zero" else st.sampled_from([2, 4, 64])
    texts = {"name": r"\A[a-z0-9][A-Za-z0-9._-]{0,20}\Z", "run.device": r"\Acpu\Z"}
    texts["data.version"] = r"\A[0-9a-f]{1,64}\Z"
    return st.from_regex(texts[name])


PATHS = {
    "model.family",
    "data.source",
    "data.cache_dir",
    "run.dir",
    "run.networks",
    "optimizer.offload_dir",
    "checkpoint.dir",
    "checkpoint.start",
    "validation.sources",
}
SETTABLE = sorted(set(fields()) - PATHS - {"layout.ranks", "model.options", "data.stages", "data.skips"})
SETS = st.dictionaries(st.sampled_from(SETTABLE), st.none(), max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: values(name) for name in names})
)


@settings(deadline=None, max_examples=200)
@given(SETS)
def test_what_is_set_is_in_the_job_and_survives_the_wire(sets):
    try:
        resolved = load(None, [f"{name}={toml(value)}" for name, value in sets.items()])
    except UserError as error:
        event("refused")
        assert error.field in {rule.field for rule in RULES}
        return
    event("resolved")
    rows = {row.field: row for row in explain(resolved)}
    for name, value in sets.items():
        if name != "model.preset":
            assert (rows[name].value, rows[name].origin) == (value, "--set")
    assert Job.from_dict(resolved.job.to_dict()) == resolved.job
    assert from_mapping(resolved.job.to_dict()).job == resolved.job
