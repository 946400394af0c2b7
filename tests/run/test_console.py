"""The view of a run: legible at any width, plain without a terminal, and literal about what the user named."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from phalanx.core.job import Job, TrainConfig
from phalanx.core.layout import Layout
from phalanx.run.console import Console, PlainConsole, duration, flops, percent, spent
from tests.observe.test_story import broken

FACTS = {
    "num_params": 791_936,
    "device": "cpu, threads per rank: 1",
    "torch": "2.11.0",
    "peak_flops": 832e9,
    "peak_source": "measured 512x512 matmul in float32, sum over ranks",
    "mfu": "6N + 12*L*d*T FLOPs per token, causal attention not halved, embedding look-up not counted",
}
SUMMARY = {
    "steps": 6,
    "unigram_entropy": 3.143,
    "first_loss": 5.517,
    "last_loss": 2.447,
    "tokens_per_s": 7012.0,
    "median_step_s": 0.584,
    "mfu": 0.052,
    "wall_s": 128.0,
    "start_s": 3.4,
    "run_dir": "/data/[bold]/:smile:/quickstart-20300101T000000Z-3977",
}


def row(step, **other):
    return {
        "step": step, "loss": 3.7221, "grad_norm": 2.501, "tokens_per_s": 6847.0, "mfu": 0.05, "goodput": 0.973,
        "time_min_s": 0.596, "time_median_s": 0.597, "time_s": 0.598, **other,
    }  # fmt: skip


def shown(columns: int | None, **options) -> list[str]:
    """The lines on a terminal of that width, or in a pipe, after a run. What was overwritten is gone."""
    return screen(written(columns, **options))


def written(columns: int | None, steps: int = 6, rows=(), fails: bool = False, **env: str) -> str:
    out = io.StringIO()
    environment = {"TERM": "xterm-256color", **env}
    console = PlainConsole(file=out, width=columns, force_terminal=columns is not None, _environ=environment)
    job = Job(layout=Layout(shard=2, tp=2), train=TrainConfig(steps=steps, reduction="exact"))
    with Console(job, out=console) as view:
        view.starting(Path(SUMMARY["run_dir"]))
        view.status("reading the text: 3.0 MB " + "x" * 200)
        view.note("corpus: 1,000,046 byte tokens from /data/[bold]/:smile:")
        view.facts(FACTS)
        for r in rows or [row(0), row(steps - 1)]:
            view.step(r)
        if not fails:
            view.finished(SUMMARY)
    return out.getvalue()


def screen(written: str) -> list[str]:
    """A terminal, as far as rich's live view uses one: colours, carriage return, cursor up, erase line."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", written):
        if part == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif part == "\x1b[1A":
            at -= 1
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part[0] not in "\x1b\r":
            lines[at] += part
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_view_fits_the_terminal(columns):
    lines = shown(columns)
    assert max(map(len, lines)) <= columns
    head = next(i for i, line in enumerate(lines) if line.startswith("step"))
    assert re.fullmatch(r"step +loss +grad norm +tokens/s +MFU +goodput +step ms min/med/max +ETA", lines[head])
    assert re.fullmatch(r" 6/6 +3.7221 +2.501 +6,847 +5.0% +97.3% +596/597/598 +0m00s", lines[head + 1])
    assert sum("3.7221" in line for line in lines) == 1, "one view that moves, not a trail of them"
    assert not any("reading the text" in line for line in lines), "what was waited for has come"


def test_large_figures_and_narrow_terminals_get_a_line_for_each():
    large = row(99_999, tokens_per_s=123_456_789.0, time_min_s=61.2, time_median_s=61.4, time_s=75.0)
    lines = shown(60, steps=1_000_000, rows=[large])
    assert max(map(len, lines)) <= 60
    assert "tokens/s             123,456,789" in lines
    assert "step ms min/med/max  61200/61400/75000" in lines
    assert "step                  100000/1000000" in lines
    assert any(line.startswith("ETA") and line.endswith("781d06h") for line in lines)


@pytest.mark.parametrize("columns", [80, 120, None])
def test_the_summary_is_legible_and_literal(columns):
    text = "\n".join(shown(columns))
    assert "loss             5.517 -> 2.447 nats per token (mean of the last 6)" in text
    assert "unigram entropy  3.143 nats; the loss is 0.696 below it" in text
    assert "speed            7,012 tokens/s, median step 584 ms, MFU 5.2%" in text
    assert "time             2m08s, including 3.4 s to start the ranks" in text
    assert "determinism      bit-identical for any replica x shard x pp split" in text
    assert SUMMARY["run_dir"] in text, "not taken for markup or an emoji"
    assert "tokens from /data/[bold]/:smile:" in text


def test_without_a_terminal_there_are_plain_whole_lines():
    lines = shown(None, rows=[row(0), row(1), row(5)])
    cells = "loss 3.7221  grad norm 2.501  tokens/s 6,847  MFU 5.0%  goodput 97.3%  step ms min/med/max 596/597/598"
    assert [line for line in lines if line.startswith("step")] == [
        f"step 1/6  {cells}  ETA 0m03s",
        f"step 6/6  {cells}  ETA 0m00s",
    ], "the first, the last, and between them one every few seconds"
    assert any(line.startswith("MFU: of 832 GFLOP/s") and line.endswith("not counted") for line in lines)


@pytest.mark.parametrize("columns", [80, None])
def test_what_a_log_says_does_not_steer_the_terminal(columns):
    out = io.StringIO()
    console = PlainConsole(file=out, width=columns, force_terminal=columns is not None, _environ={"TERM": "xterm"})
    with Console(Job(), out=console) as view:
        view.starting(Path("runs"))
        for tell in (view.note, view.status):
            tell("one\x1b]0;owned\x07\ttwo\nthree\x1b[2J")
    assert "\x1b]0" not in out.getvalue() and "\x1b[2J" not in out.getvalue() and "\x07" not in out.getvalue()
    assert "one\\x1b]0;owned\\x07" in out.getvalue() and "\nthree\\x1b[2J" in out.getvalue()


def test_a_run_that_fails_leaves_its_last_row_on_the_screen():
    lines = shown(80, rows=[row(0), row(2)], fails=True)
    assert any(line.startswith(" 3/6") for line in lines)
    assert not any(line.startswith("loss   ") for line in lines)


def test_no_color_is_respected():
    colour = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|9[0-7])[;m]")
    assert colour.search(written(80))
    assert not colour.search(written(80, NO_COLOR="1"))


def test_units():
    assert [duration(s) for s in (0.4, 59.7, 3599, 3600, 200_000)] == ["0m00s", "1m00s", "59m59s", "1h00m", "2d07h"]
    assert [flops(x) for x in (5e9, 2.5e12, 3e15, 1.2e18)] == [
        "5 GFLOP/s", "2.5 TFLOP/s", "3.0 PFLOP/s", "1.2 EFLOP/s",
    ]  # fmt: skip
    assert [percent(x) for x in (None, 0.0, 0.00042, 0.41)] == ["-", "0.000%", "0.042%", "41.0%"]


def test_the_summary_says_where_the_gpu_seconds_went_and_what_broke(tmp_path):
    path = broken(tmp_path).end()
    text = spent(path)
    assert text["goodput"].startswith("50.4% of 13 GPU-seconds; start 28.4%")
    assert text["incidents"].startswith("1: Rank 1 on node-0 was killed by SIGKILL")
    assert spent(tmp_path / "nothing") == {}
