"""The validation loss is the same for any layout, and training does not notice it. When this fails, a user compares two
runs by numbers that cannot be compared, or gets other weights because of a measurement."""

import dataclasses

import pytest

from phalanx.core.job import DataConfig, ValidationConfig
from phalanx.data.build import build
from phalanx.data.tokenizer import Bytes
from phalanx.data.validation import ValidationSet
from phalanx.observe.fold import fold_of, folded, loss_of
from tests.cases import DEEP, DEEPER, EVEN, MOE, ODD, make_job

WIDE = {"vocab_size": 257}


def sized(model):
    return dataclasses.replace(model, **WIDE)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(5):
        (folder / f"{number}.txt").write_text("".join(f"line {number} {i * i}\n" for i in range(40)))
    build([("text", str(folder))], folder / "set", Bytes(), workers=1)
    return str(folder / "set")


def sets_of(job, text, **validation):
    asked = ValidationConfig(**{"sources": [text], "sequences": 7, **validation})
    job = dataclasses.replace(job, data=DataConfig(source=text), validation=asked)
    return job, [ValidationSet.plan(job, "text", text).to_dict()]


def run(pool, job, sets):
    answers = pool.run("tests.train.validation_cases:train", job, sets=sets)
    losses = []
    for number in range(3 if sets else 0):
        about = {"type": "validation", "step": number, "generation": 0}
        (whole,) = folded(fold_of(rank, {**about, **a["said"][number]}) for rank, a in enumerate(answers))
        assert whole["ranks"] == [[0, job.layout.world_size]]
        losses.append((loss_of(whole, "text"), whole["tokens"]["text"]))
    return losses, [a["digest"] for a in answers]


CASES = [
    ("shard 2, ZeRO-1", (1, 2, 1), dict(zero=1)),
    ("pp 2, ZB-V", (1, 1, 1), dict(model=DEEP, axes=dict(pp=2, schedule="zbv"))),
    ("moe: shard 2, ep 2", (1, 2, 1), dict(model=MOE, axes=dict(ep=2))),
]
SLOW = [
    ("replica 2", (2, 1, 1), {}),
    ("tp 2", (1, 1, 2), {}),
    ("cp 2", (1, 1, 1), dict(axes=dict(cp=2))),
    ("replica 8", (8, 1, 1), {}),
    ("shard 8", (1, 8, 1), {}),
    ("shard 8, ZeRO-2, full recompute", (1, 8, 1), dict(zero=2, recompute="full")),
    ("tp 4 x replica 2", (2, 1, 4), dict(model=EVEN)),
    ("cp 8", (1, 1, 1), dict(axes=dict(cp=8))),
    ("cp 2, Ulysses x shard 4", (1, 4, 1), dict(axes=dict(cp=2, cp_style="ulysses"))),
    ("pp 4, interleaved x replica 2", (2, 1, 1), dict(model=DEEPER, axes=dict(pp=4, schedule="interleaved"))),
    ("pp 8, 1F1B", (1, 1, 1), dict(model=DEEPER, axes=dict(pp=8))),
    ("moe: tp 2 x pp 2 x cp 2, ep 2", (1, 1, 2), dict(model=MOE, axes=dict(pp=2, cp=2, ep=2))),
    ("moe: shard 8, ep 4", (1, 8, 1), dict(model=MOE, axes=dict(ep=4))),
    ("replica 2 x shard 2 x tp 2, offloaded", (2, 2, 2), dict(offload_activations=True)),
    ("compiled: shard 2 x tp 2 x replica 2", (2, 2, 2), dict(compile="aot_eager")),
]
PARAMS = [pytest.param(*c[1:], id=c[0]) for c in CASES]
PARAMS += [pytest.param(*c[1:], id=c[0], marks=pytest.mark.slow) for c in SLOW]


@pytest.mark.parametrize("layout, options", PARAMS)
def test_the_loss_is_that_of_one_rank_and_training_keeps_its_bits(pool, text, layout, options):
    options = {**options, "model": sized(options.get("model", ODD))}
    job, sets = sets_of(make_job(layout, global_batch=8, **options), text)
    alone = {key: value for key, value in options.items() if key == "model"}
    single, _ = sets_of(make_job((1, 1, 1), global_batch=8, **alone), text)
    losses, digests = run(pool, job, sets)
    assert len({loss for loss, _ in losses}) == 3, "it does not see what is trained"
    for (here, tokens), (there, counted) in zip(losses, run(pool, single, sets)[0], strict=True):
        assert tokens == counted and here == pytest.approx(there, abs=1e-10)
    assert run(pool, job, [])[1] == digests


def test_what_is_held_out_is_not_trained_on(text):
    """The samples of the order and those of the set are all samples, each once."""
    job, _ = sets_of(make_job(model=sized(ODD)), text, sources=[], held_out=0.25, sequences=0)
    held = ValidationSet.plan(job, "held-out", text)
    loader = held.data.open()
    total = [cut.num_samples for cut in loader.cuts]
    served = [stream.num_samples for stream in loader.order.streams]
    assert held.first == served and held.count == sum(total) - sum(served) > 0
    loader.close()
