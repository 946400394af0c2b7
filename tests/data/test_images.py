"""Drawn images as a function of the position."""

import math

import numpy as np
import pytest

from phalanx.core.image import ImageShape
from phalanx.core.job import DataConfig, Job, TrainConfig
from phalanx.core.shape import ModelConfig
from phalanx.data.images import CLASSES, Images, pattern
from phalanx.data.source import build, open_source

SHAPE = ImageShape(size=12, patch=4, channels=2)


def test_an_image_is_a_function_of_seed_and_position():
    source = Images(SHAPE, 4, seed=3)
    both, one = source.samples([5, 6]), Images(SHAPE, 4, seed=3).samples([6])
    assert np.array_equal(both.tokens_BL[1], one.tokens_BL[0]) and both.targets_BL[1, 0] == one.targets_BL[0, 0]
    assert not np.array_equal(both.tokens_BL[0], both.tokens_BL[1])
    assert not np.array_equal(Images(SHAPE, 4, seed=4).samples([6]).tokens_BL, one.tokens_BL)


def test_samples_are_sequences_of_patches():
    s = Images(SHAPE, 4, seed=0).samples(range(5))
    assert s.tokens_BL.shape == (5, 9, 32) and s.tokens_BL.dtype == np.float32
    assert s.targets_BL.shape == s.weights_BL.shape == (5, 9) and s.targets_BL.dtype == np.int64
    assert (s.targets_BL == s.targets_BL[:, :1]).all() and (s.weights_BL == 1).all() and s.documents_BL is None


def test_patches_put_together_are_the_image():
    source = Images(SHAPE, 4, seed=1)
    _, pixels = source.draw(7)
    patches = source.samples([7]).tokens_BL[0]
    for at, patch in enumerate(patches):
        y, x = 4 * (at // 3), 4 * (at % 3)
        assert np.array_equal(patch.reshape(4, 4, 2), pixels[y : y + 4, x : x + 4])


def test_classes_are_equally_frequent():
    counts = np.bincount([Images(SHAPE, 8, seed=2).draw(i)[0] for i in range(2000)], minlength=8)
    assert counts.sum() == 2000 and abs(counts - 250).max() < 5 * math.sqrt(250)
    assert Images(SHAPE, 8, seed=2).unigram_entropy() == pytest.approx(math.log(8))


@pytest.mark.parametrize("name", CLASSES)
def test_patterns_have_both_tones(name):
    drawn = pattern(name, 32, np.random.default_rng(0))
    assert drawn.shape == (32, 32) and np.abs(drawn).max() <= 1
    assert 0.02 < (drawn > 0).mean() < 0.98


def test_the_source_is_chosen_by_name(tmp_path):
    job = Job(
        model=ModelConfig(family="image", vocab_size=5, options={"image": 12, "patch": 4, "channels": 2}),
        train=TrainConfig(seq_len=9),
        data=DataConfig(source="synthetic-images"),
    )
    assert "5 classes of 12 x 12" in build(job, tmp_path, lambda size_bytes: None)
    assert not list(tmp_path.iterdir())
    assert isinstance(open_source(job, tmp_path), Images)
