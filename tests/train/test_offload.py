"""Memory that is saved must not cost a bit of the result, unless it says so (bf16 moments), and nothing may be
left on a disk. When this fails, a run that was made to fit is another run, or fills somebody's disk."""

import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.core.compat import BF16_MAX_BETA
from phalanx.core.errors import UserError
from phalanx.core.layout import Coord
from phalanx.model import load_family
from phalanx.parallel import offload
from phalanx.spec import load
from phalanx.train.optimizer import ALIGN_NUMEL, cut
from phalanx.train.state import State
from tests.cases import CPU, MOE, ODD, assemble, make_job

CASES = "tests.train.offload_cases:"
PLACES = ["none", "cpu", "nvme"]
VARIANTS = [(state, place) for state in ("full", "bf16") for place in PLACES if (state, place) != ("full", "none")]


def job_with(state="full", offload="none", folder="", layout=(1, 1, 1), beta2=0.95, **options):
    job = make_job(layout, **({"precision": "fp32"} | options))
    changed = dataclasses.replace(job.optimizer, state=state, offload=offload, offload_dir=str(folder), beta2=beta2)
    return dataclasses.replace(job, optimizer=changed)


def create(job) -> State:
    return State.create(job, load_family("dense"), Coord(0, 0, 0), CPU)


def update(state: State) -> None:
    grads = {param: torch.ones_like(param) for param in state.params.values()}
    state.optimizer.update(grads, 1e-3, None, torch.tensor(True))


# -- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision, reduction", [("fp32", "fast"), ("fp32", "exact"), ("fp64", "fast")])
def test_moments_elsewhere_give_the_same_bits(pool, tmp_path, precision, reduction):
    options = dict(layout=(1, 2, 1), precision=precision, reduction=reduction)
    digests = {}
    for place in PLACES:
        job = job_with(offload=place, folder=tmp_path, **options)
        answers = pool.run(CASES + "train", job, stem=str(tmp_path / place), steps=4)
        digests[place] = [a["digest"] for a in answers]
    assert digests["cpu"] == digests["nvme"] == digests["none"]
    different = pool.run(CASES + "train", job_with(state="bf16", **options), stem=str(tmp_path / "bf16"), steps=4)
    assert different[0]["digest"]["optimizer"] != digests["none"][0]["optimizer"], "so that the test can fail"


@pytest.mark.parametrize("state, place", VARIANTS)
def test_the_moments_are_where_and_what_was_asked_for(pool, tmp_path, state, place):
    (answer,) = pool.run(CASES + "kept", job_with(state, place, tmp_path))
    assert answer["dtypes"] == ["torch.bfloat16" if state == "bf16" else "torch.float32"]
    assert answer["steps"] == 2
    held, per_param = answer["held"], 4 if state == "bf16" else 8
    where = held["file"] if place == "nvme" else held["host"]
    assert where == pytest.approx(per_param * answer["numel"], rel=0.1)
    if place == "nvme":
        assert held["host"] < held["file"] / 5, "a few parcels in memory, no more"
    else:
        assert held["file"] == 0


def test_bf16_moments_train_almost_as_full_ones_do(pool, tmp_path):
    weights = {}
    for state in ("full", "bf16"):
        job, stem = job_with(state, steps=30), str(tmp_path / state)
        pool.run(CASES + "train", job, stem=stem, steps=30)
        whole = assemble(job, stem)
        weights[state] = np.concatenate([whole[k].ravel() for k in sorted(whole) if k.startswith("weights/")])
    first = create(job).params
    start = np.concatenate([first[k].detach().numpy().ravel() for k in sorted(first)])
    apart, moved = (np.linalg.norm(weights["full"] - w) for w in (weights["bf16"], start))
    assert 0 < apart < 0.1 * moved


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("state, place", VARIANTS)
def test_a_step_that_is_not_finite_leaves_weights_and_moments(pool, tmp_path, state, place, reduction):
    job = job_with(state, place, tmp_path, layout=(1, 2, 1), reduction=reduction)
    for answer in pool.run(CASES + "not_finite", job):
        assert answer == {"untouched": True, "goes on": True, "kept": 0}


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=8), room=st.integers(1, 40).map(lambda n: n * ALIGN_NUMEL)
)
def test_parcels_hold_every_element_once_and_cut_where_no_bit_changes(sizes, room):
    params = [nn.Parameter(torch.empty(size)) for size in sizes]
    parcels = cut(params, room)
    covered = {id(p): 0 for p in params}
    for pieces in parcels:
        end = 0
        for piece in pieces:
            assert piece.start == covered[id(piece.param)] and piece.start % ALIGN_NUMEL == 0
            assert piece.place >= end and piece.place % ALIGN_NUMEL == 0
            covered[id(piece.param)], end = piece.stop, piece.place + piece.stop - piece.start
        assert end <= room
    assert [covered[id(p)] for p in params] == sizes


def test_the_largest_beta_for_bf16_is_where_a_fading_moment_still_decays():
    significands = torch.arange(128, 256).bfloat16()  # every value of one binade, and so of all

    def stuck(beta):
        return int(((significands.float() * beta).bfloat16() == significands).sum())

    assert stuck(BF16_MAX_BETA - 1e-6) == 0
    assert stuck(BF16_MAX_BETA + 1e-4) > 0
    assert stuck(0.999) == 128


# -- the disk -------------------------------------------------------------------------------------


def test_a_relative_folder_starts_where_it_is_written(tmp_path):
    (tmp_path / "job.toml").write_text('[optimizer]\noffload = "nvme"\noffload_dir = "scratch"\n')
    assert load(tmp_path / "job.toml").job.optimizer.offload_dir == str(tmp_path / "scratch")
    assert load(None).job.optimizer.offload_dir == ""


@pytest.mark.parametrize("folder", ["missing", "file", "/proc"])
def test_a_folder_one_cannot_write_to_is_refused(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"optimizer\.offload_dir = '.*': no file can be made there"):
        create(job_with(offload="nvme", folder=tmp_path / folder))


def test_a_disk_too_small_is_refused_before_the_first_step(tmp_path, monkeypatch):
    job = job_with(offload="nvme", folder=tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"optimizer\.offload_dir = .*no room for .* of moments"):
            create(job)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="No space left on device"):
        create(job)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_later_is_reported_the_same_way(tmp_path, monkeypatch):
    """Some file systems promise room that they do not have."""
    state = create(job_with(offload="nvme", folder=tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(UserError, match=r"optimizer\.offload_dir"):
        update(state)
        state.digest()


ONE_STEP = """
import sys
from tests.train.test_offload import create, job_with, update
state = create(job_with(offload="nvme", folder=sys.argv[1]))
update(state)
state.digest()
print("done", flush=True)
sys.stdin.read()
"""


def test_nothing_is_left_on_the_disk_even_after_sigkill(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ONE_STEP, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "done\n"
        open_files = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]
        (mine,) = (file for file in open_files if file.startswith(str(tmp_path)))
        assert mine.endswith("(deleted)") and os.listdir(tmp_path) == []
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL and os.listdir(tmp_path) == []


# -- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, options",
    [
        ((1, 2, 1), {}),
        ((1, 2, 1), dict(recompute="full")),
        ((1, 2, 1), dict(recompute="selective")),
        ((1, 2, 2), dict(zero=1)),
        ((2, 2, 1), dict(precision="bf16", reduction="exact")),
        ((1, 2, 1), dict(model=MOE)),  # whose experts are gathered within the unit
    ],
    ids=str,
)
def test_offloaded_activations_give_the_same_gradients(pool, layout, options):
    job = make_job(layout, **({"precision": "fp32"} | options))
    away = dataclasses.replace(job, train=dataclasses.replace(job.train, offload_activations=True))
    there, elsewhere = (pool.run(CASES + "gradients", j) for j in (job, away))
    units, micro_batches = ODD.num_layers, job.micro_per_rank * 2
    for a, b in zip(there, elsewhere, strict=True):
        assert a["bits"] == b["bits"]
        assert a["packed"] == 0 and b["packed"] > 0 and b["parameters"] == 0
        if job.train.recompute == "none":
            assert b["copies"] < b["packed"], "a tensor saved twice is copied once"
        else:
            assert b["packed"] == b["copies"] == units * micro_batches, "a unit's input alone"


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x_BD, scale_D):
        return torch.sigmoid(self.linear(x_BD)) * scale_D


def test_the_host_copies_go_as_the_backward_comes_by(monkeypatch):
    """Otherwise a step would end with all activations in host memory."""
    monkeypatch.setattr(offload, "THRESHOLD_BYTES", 64)
    alive: list = []
    copy = offload._Copy

    def watched(host):
        alive.append(offload.weakref.ref(made := copy(host)))
        return made

    monkeypatch.setattr(offload, "_Copy", watched)
    units = [Unit() for _ in range(3)]
    offload.apply_offload(units, CPU)
    x_BD = torch.randn(8, 64, requires_grad=True)
    out, scale_D, left = x_BD, torch.ones(64), []
    for unit in units:
        out.register_hook(lambda _: left.append(sum(ref() is not None for ref in alive)))
        out = unit(out, scale_D)
    assert sum(ref() is not None for ref in alive) == 6  # each unit's input, and its sigmoid
    out.sum().backward()
    assert left == sorted(left, reverse=True) and left[0] <= 5 and left[-1] <= 1, left
    assert all(ref() is None for ref in alive)
