"""What a user sees of a search: refusals that say by how much and what would help, the quality of picks, pictures."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from phalanx.core.errors import UserError
from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.known_models import published_shape
from phalanx.plan.lab.picks import headroom, picks
from phalanx.plan.lab.reading import packaged, read_runs
from phalanx.plan.planner import Request, find, plan_of, usual_batch
from phalanx.plan.report.answer import answer
from phalanx.plan.report.html import page
from phalanx.plan.report.timeline import play
from phalanx.plan.report.words import memory_rows, step_rows
from phalanx.plan.search.impossible import impossible, parse_pins
from phalanx.plan.search.space import Ask, Limits
from phalanx.plan.settings import job_lines


@pytest.fixture(scope="module")
def catalogue():
    return load_packaged()


def request(catalogue, model: str, gpus: int, batch: int = 0, **limits) -> Request:
    shape, cluster = published_shape(model, 8192), catalogue.cluster("h100", gpus)
    profile = default_profile(cluster.node.chip)
    return Request(model, Ask(shape, cluster, profile, batch or usual_batch(gpus, 8192), Limits(**limits)), 1e12)


def refusal(catalogue, asked: Request) -> UserError:
    assert not len(find(asked))
    return impossible(asked.ask, catalogue)


def test_too_large_a_model_says_by_how_much_and_what_would_fit(catalogue):
    error = refusal(catalogue, request(catalogue, "llama3-405b", 64))
    needed, missing = (float(x) for x in re.findall(r"needs ([\d.]+) GB on a chip \(P95\), ([\d.]+)", str(error))[0])
    limit = catalogue.chip("h100").memory_bytes / 1e9
    assert needed - limit == pytest.approx(missing, abs=0.1)
    assert "141 GB" in error.remedy and "take 128 of them" in error.remedy
    assert len(find(request(catalogue, "llama3-405b", 128)))  # and it is true


def test_a_batch_that_does_not_divide_is_named(catalogue):
    error = refusal(catalogue, request(catalogue, "llama3-8b", 16384, batch=1, tolerance=0.0))
    assert error.field == "global_batch" and error.value == 1
    good = int(re.findall(r"([\d,]+) would do", error.remedy)[0].replace(",", ""))
    assert len(find(request(catalogue, "llama3-8b", 16384, batch=good, tolerance=0.0)))


def test_a_pin_that_cannot_be_is_named_with_what_can(catalogue):
    error = refusal(catalogue, request(catalogue, "llama3-70b", 64, pins={"cp": 1, "tp": 3}))
    assert error.field == "tp" and "1, 2, 4, 8" in error.remedy
    error = refusal(catalogue, request(catalogue, "llama3-70b", 64, pins={"tp": 8, "pp": 5, "cp": 16}))
    assert "640 ranks" in error.message and "64 chips" in error.message


@pytest.mark.parametrize(
    "text", ["tp", "tp=x", "tq=8", "zero=4", "tp=0", "recompute=some", "schedule=2f2b", "tp=-1", "tp=8,tp=4"]
)
def test_pins_that_are_none(text):
    with pytest.raises(UserError, match="pin = ") as error:
        parse_pins(text, "pin")
    assert error.value.remedy


def test_pins_are_read():
    assert parse_pins("tp=8, dp=2,recompute=full,", "pin") == {"tp": 8, "dp": 2, "recompute": "full"}


def test_the_pick_among_published_layouts_is_within_five_percent():
    """The fit leaves out the source."""
    found = picks(packaged(), load_packaged())
    assert len(found) >= 5 and min(p.spread for p in found) > 0.05
    assert max(p.regret for p in found) <= 0.05


def test_the_search_leaves_out_nothing_that_people_run():
    runs, _ = read_runs(packaged(), load_packaged())
    found = [gain for run in runs[::12] if (gain := headroom(run)) is not None]
    assert len(found) >= 10 and min(found) >= -1e-9


@pytest.mark.parametrize("schedule, pp, vpp, m, bubble", [
    ("1f1b", 4, 1, 8, 3 * 3), ("gpipe", 4, 1, 8, 3 * 3), ("interleaved", 4, 2, 8, 3 * 3 / 2), ("1f1b", 1, 1, 3, 0),
    ("interleaved", 2, 3, 4, 3 / 3),
])  # fmt: skip
def test_the_drawn_pipeline_has_the_bubble_of_its_schedule(schedule, pp, vpp, m, bubble):
    blocks = play(schedule, pp, vpp, m)
    assert len(blocks) == 2 * pp * vpp * m
    assert max(b.end for b in blocks) == pytest.approx(3 * m + bubble)
    for rank in range(pp):
        mine = sorted((b.start, b.end) for b in blocks if b.rank == rank)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(mine))
    if schedule != "gpipe":  # activations of that many chunks are held, not more
        order = sorted((b.start, b.backward) for b in blocks if b.rank == 0)
        held = max(itertools.accumulate(-1 if backward else 1 for _, backward in order))
        assert held == min(m * vpp, (pp if vpp == 1 else 2 * (pp - 1) + (vpp - 1) * pp + 1))


def test_the_page_is_one_file_with_all_pictures(catalogue):
    asked = request(catalogue, "llama3-70b", 512, pins={"tp": 8, "pp": 4, "cp": 1})
    made = answer(asked, catalogue, ("recompute=full", "tp=16,recompute=none"))
    text = page(made)
    pictures = [ET.fromstring(p) for p in re.findall(r"<svg.*?</svg>", text, re.S)]
    labels = [p.get("aria-label") for p in pictures]
    assert labels == [
        "memory by term", "seconds of a step by term", "the pipeline", "tokens/s, linear", "tokens/s, logarithmic"
    ]  # fmt: skip
    assert all(word in text for word in ("forward", "backward", "idle", "in proportion", "P95"))  # legends
    assert "initial-scale=1" in text and "max-width: 640px" in text  # a phone
    assert not re.search(r"https?://|<script|src=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    assert len(list(pictures[1].iter("rect"))) == len(step_rows(made.plan))
    assert made.compared[0][1].layout["recompute"] == "full"
    assert isinstance(made.compared[1][1], UserError), "tp=16 crosses nodes, and does not end the rest"


def test_rows_add_up_to_the_whole(catalogue):
    plan = answer(request(catalogue, "llama3-8b", 64), catalogue).plan
    assert sum(share for _, _, share, _ in step_rows(plan)) == pytest.approx(1, abs=0.01)
    assert sum(share for _, _, share, _ in memory_rows(plan)) == pytest.approx(
        plan.memory_bytes / plan.capacity_bytes, abs=1e-6
    )
    assert all(formula for _, _, _, formula in (*step_rows(plan), *memory_rows(plan)))
    assert plan.to_json()["hash"] == plan.hash != replace(plan, chips=1).hash


@pytest.mark.parametrize("model, gpus", [("llama3-70b", 512), ("mixtral-8x7b", 64), ("gpt3-175b", 384)])
def test_what_is_found_is_accepted_as_a_job(catalogue, tmp_path, model, gpus):
    from phalanx.spec import load

    asked = request(catalogue, model, gpus)
    found, path = find(asked), tmp_path / "job.toml"
    for row in range(0, len(found), max(1, len(found) // 12)):
        plan = plan_of(asked, found, row)
        path.write_text("\n".join(["[model]", f'preset = "{model}"', *job_lines(plan)]))
        job = load(path).job
        assert job.layout.world_size == plan.used and job.micro_per_rank == plan.micro_batches


def test_data_ranks_can_be_given(catalogue):
    found = find(request(catalogue, "llama3-70b", 256, pins={"dp": 16, "tp": 8}))
    assert set(found.candidates.data_ranks) == {16} and set(found.candidates.tp) == {8}
