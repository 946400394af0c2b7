"""Drawn images, and their way into a run."""

import math

import numpy as np
import pytest

from phalanx.core.image import ImageShape
from phalanx.core.job import DataConfig, Job, RunConfig, TrainConfig
from phalanx.core.shape import ModelConfig
from phalanx.data.images import CLASSES, Images, pattern
from phalanx.data.samples import unpack
from phalanx.data.selection import RunData
from phalanx.data.source import prepare

SHAPE = ImageShape(size=12, patch=4, channels=2)


def test_an_image_is_a_function_of_seed_and_number():
    kind, pixels = Images(SHAPE, 4, seed=3).draw(6)
    again = Images(SHAPE, 4, seed=3).draw(6)
    assert again[0] == kind and np.array_equal(again[1], pixels)
    assert not np.array_equal(Images(SHAPE, 4, seed=3).draw(5)[1], pixels)
    assert not np.array_equal(Images(SHAPE, 4, seed=4).draw(6)[1], pixels)


def test_patches_put_together_are_the_image():
    source = Images(SHAPE, 4, seed=1)
    _, pixels = source.draw(7)
    for at, patch in enumerate(source.patches(pixels)):
        y, x = 4 * (at // 3), 4 * (at % 3)
        assert np.array_equal(patch.reshape(4, 4, 2), pixels[y : y + 4, x : x + 4])


def test_classes_are_equally_frequent():
    counts = np.bincount([Images(SHAPE, 8, seed=2).draw(i)[0] for i in range(2000)], minlength=8)
    assert counts.sum() == 2000 and abs(counts - 250).max() < 5 * math.sqrt(250)


@pytest.mark.parametrize("name", CLASSES)
def test_patterns_have_both_tones(name):
    drawn = pattern(name, 32, np.random.default_rng(0))
    assert drawn.shape == (32, 32) and np.abs(drawn).max() <= 1
    assert 0.02 < (drawn > 0).mean() < 0.98


def test_they_go_through_shards_like_everything_else(tmp_path):
    job = Job(
        model=ModelConfig(family="image", vocab_size=5, options={"image": 12, "patch": 4, "channels": 2}),
        train=TrainConfig(seq_len=9),
        data=DataConfig(source="synthetic-images"),
        run=RunConfig(dir=str(tmp_path / "runs")),
    )
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    line, entropy = prepare(job, run_dir, lambda size_bytes: None)
    assert "4,096 records" in line and entropy == pytest.approx(math.log(5), abs=0.01)
    loader = RunData.read(run_dir).open()
    _, numbers = loader.order.locate(np.arange(6))
    s = unpack(loader.rows(range(6)), loader.manifest.eos)
    loader.close()
    assert s.tokens_BL.shape == (6, 9, 32) and s.tokens_BL.dtype == np.float32 and s.documents_BL is None
    assert s.targets_BL.shape == s.weights_BL.shape == (6, 9) and s.targets_BL.dtype == np.int64
    images = Images(SHAPE, 5, seed=job.seed)
    for number, patches, targets in zip(numbers.tolist(), s.tokens_BL, s.targets_BL, strict=True):
        kind, pixels = images.draw(number)
        assert np.array_equal(patches, images.patches(pixels)) and (targets == kind).all()
    again, _ = prepare(job, run_dir, lambda size_bytes: None)
    assert again == line and len(list((tmp_path / "runs" / ".data").iterdir())) == 1  # made once
