"""Follow docs/continue-pretraining.md line by line: from a folder of transformers and Parquet to a run that continues
its training, and back. When this fails, a newcomer's first hour does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.data.texts import train_bpe, words
from tests.system.command import phalanx, train

PAGE = Path(__file__).parents[2] / "docs" / "continue-pretraining.md"
SMALL = ["train.steps=3", "train.seq_len=32", "train.global_batch=4", "layout.ranks=1", "checkpoint.every_steps=3"]


def commands() -> list[list[str]]:
    found = re.findall(r"^\$ phalanx (.*)$", PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in found]


@pytest.fixture
def folder(tmp_path):
    """Return the folder that the page begins with, with a model that fits in a test."""
    transformers = pytest.importorskip("transformers")
    import pyarrow as pa
    import pyarrow.parquet as pq

    model = tmp_path / "Llama-3.2-1B"
    scaled = dict(
        rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, rope_parameters=scaled,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    train_bpe(model / "tokenizer.json", special=("<begin>", "<end of it>"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end of it>"}}))
    (tmp_path / "text").mkdir()
    pq.write_table(pa.table({"text": [words(s, 200) for s in range(40)]}), tmp_path / "text" / "a.parquet")
    return tmp_path


def test_three_commands_continue_a_training_and_one_brings_it_back(folder):
    build, convert, run, back = commands()
    assert [line[0] for line in (build, convert, run, back)] == ["data", "convert", "train", "convert"]
    built = phalanx(folder, *build)
    assert built.returncode == 0, built.stderr
    made = phalanx(folder, *convert)
    assert made.returncode == 0, made.stderr
    assert (folder / "weights" / "assets" / "tokenizer.json").read_bytes()
    told = json.loads(phalanx(folder, "data", "info", "data", "--json").stdout)
    assert told["eos"] == 1, "what ends a text is what the model's tokenizer says"
    ended = train(folder, *run[1:], *[part for field in SMALL for part in ("--set", field)], HOME=str(folder))
    assert ended.code == 0, ended.err
    ended.check_clean()
    assert len(ended.rows) == 3
    checkpoint = json.loads((ended.runs[0] / "job.json").read_text())["job"]
    assert checkpoint["model"]["context"] == 512 and checkpoint["model"]["rope_scaling"] == "llama3"
    where = [str(ended.runs[0]) if part == "runs/my-run" else part for part in back]
    out = phalanx(folder, *where)
    assert out.returncode == 0, out.stderr
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 512 and config["eos_token_id"] == 1
    assert config["rope_parameters"]["rope_type"] == "llama3" and (folder / "out" / "tokenizer.json").is_file()
