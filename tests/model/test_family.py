"""The door for models: a family of the user's own trains on every layout as on one rank, and a description that
does not fit its model is refused where it is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.core.shape import FAMILIES, ModelConfig
from phalanx.model.dense import DENSE, Decoder
from phalanx.model.family import BUILTIN, Batch, Family, check_family, load_family
from phalanx.parallel.schema import describe
from tests.cases import IMAGE, MOE, MOE_ODD, connect, make_job

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'custom_model.py'}:FAMILY"
# Odd sizes, and a table of positions with more rows than there are positions.
CUSTOM = ModelConfig(family=EXAMPLE, vocab_size=101, options={"dim": 40, "heads": 4, "layers": 2, "context": 27})


def case_losses(args):
    """Run three steps inside a pool worker; return the summed loss, the tokens and the gradient norm of each."""
    rank = connect(args)
    rows = []
    for step in range(3):
        out = rank.engine.step(rank.batches(step))
        rows.append([float(out.loss_sums.sum()), out.local_tokens, float(out.grad_norm)])
    rank.close()
    return rows


def curves(pool, layout, **options) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step, over all ranks that see samples of their own."""
    job = make_job(layout, model=CUSTOM, micro_batch=2, global_batch=8, **options)
    answers = pool.run("tests.model.test_family:case_losses", job)
    last = job.layout.rank_of_stage(job.layout.num_stages - 1)
    at = [job.layout.coord(rank) for rank in range(job.layout.world_size)]
    seen = [rows for rows, c in zip(answers, at, strict=True) if c.tp == 0 and c.pp == last]
    parts = job.layout.cp  # each cp rank has part of the loss, and counts all tokens
    return [
        (sum(r[step][0] for r in seen) / sum(r[step][1] for r in seen) * parts, seen[0][step][2]) for step in range(3)
    ]


PIPELINE, CONTEXT = dict(pp=2), dict(cp=2)


@pytest.mark.parametrize(
    "masked, layouts",
    [
        (True, [((1, 2, 2), {}), ((1, 1, 2), PIPELINE | CONTEXT), ((1, 2, 1), PIPELINE | {"schedule": "gpipe"})]),
        (False, [((1, 2, 2), {}), ((2, 1, 2), {}), ((1, 1, 1), CONTEXT | {"cp_style": "ulysses"})]),
    ],
)
def test_a_model_of_ones_own_trains_alike_on_every_layout(pool, masked, layouts):
    single = curves(pool, (1, 1, 1), document_mask=masked)
    assert len({loss for loss, _ in single}) == 3
    for layout, axes in layouts:
        rows = curves(pool, layout, document_mask=masked, axes=axes)
        assert rows == [pytest.approx(row, rel=1e-9) for row in single], (layout, axes)


def file(tmp_path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "import no_such_thing",
            r"cannot be imported: ModuleNotFoundError: No module named 'no_such_thing' \(line 1\)",
        ),
        ("def f(:\n", r"cannot be imported: SyntaxError"),
        ("x = 1\ny = x / 0\n", r"ZeroDivisionError: division by zero \(line 2\)"),
        ("x = 1", "MINE is not there"),
        ("MINE = 1", "MINE is not a phalanx.Family"),
        ("from phalanx.model.dense import DENSE as THEIRS", r"(?s)MINE is not there.*mine.py has THEIRS"),
        (
            "import dataclasses\nfrom phalanx.model.dense import DENSE\n"
            "MINE = dataclasses.replace(DENSE, split={'head': 'diagonal'})",
            r"(?s)layer 'head' has the unknown split style 'diagonal'.*use one of gather, column",
        ),
    ],
)
def test_a_file_that_gives_no_family_is_the_users_mistake(tmp_path, text, said):
    with pytest.raises(UserError, match=said) as refused:
        load_family(f"{file(tmp_path, text)}:MINE")
    assert refused.value.field == "model.family" and refused.value.remedy


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("from phalanx.model.dense import DENSE\n")
    assert load_family(f"{file(tmp_path, 'from neighbour_of_mine import DENSE as MINE')}:MINE") is DENSE


class WithBuffer(Decoder):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("mask", torch.ones(3), persistent=False)


class WithPadding(Decoder):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.dim, padding_idx=0)


def larger_vocabulary(config):
    return Decoder(dataclasses.replace(config, vocab_size=300))


def dense(**changes) -> Family:
    return dataclasses.replace(DENSE, **changes)


NO_EMBED = {name: style for name, style in DENSE.split.items() if name != "embed"}
WRONG = [
    (dense(split=DENSE.split | {"norm": "row"}), "'norm' has the split style 'row' but is a RMSNorm", "Linear"),
    (dense(split=DENSE.split | {"layers.*.mlp": "gather"}), r"'layers.\*.mlp' matches no module", r"layers.\*.ffn, "),
    (dense(units=("blocks.*",)), r"units pattern 'blocks.\*' matches no module", r"layers.\*, "),
    (dense(split=NO_EMBED), "embedding 'embed' is not split", "'embed': 'vocab'"),
    (dense(build=WithBuffer), "'mask' is a buffer", "compute it in forward"),
    (dense(build=WithBuffer, buffers={"layers.*.mask": 0.0}), "'mask' is a buffer", "compute it in forward"),
    (dense(experts=("layers.*.moe",)), r"experts pattern 'layers.\*.moe' matches no module", r"layers.\*.ffn, "),
    (dense(optional=("layers.*.mlp",), split=DENSE.split | {"layers.*.mlps": "row"}), "mlps' matches no", "layers"),
    (dense(build=WithPadding), "'embed' has padding_idx", "leave them out"),
    (dense(build=larger_vocabulary), "300 outputs, but model.vocab_size is 257", "agree"),
    (dense(init=lambda name, config: 0.02), "init gives 0.02 for 'embed.weight'", "phalanx.Init"),
    (dense(build=lambda config: config.options["depth"]), "building the model failed: KeyError: 'depth'", "sizes"),
]


@pytest.mark.parametrize("family, said, remedy", WRONG, ids=[said for _, said, _ in WRONG])
def test_a_description_that_does_not_fit_its_model_is_refused(family, said, remedy):
    with pytest.raises(UserError, match=f"(?s){said}.*remedy: .*{remedy}"):
        check_family(family, ModelConfig())


def test_the_families_that_come_along_pass():
    assert set(BUILTIN) == set(FAMILIES)
    plain_moe = dataclasses.replace(MOE, dense_layers=0, shared_experts=0)
    for config in (ModelConfig(), ModelConfig(tied=True), MOE, MOE_ODD, plain_moe, IMAGE, CUSTOM):
        check_family(load_family(config.family), config)


def test_the_page_about_it_shows_the_model_that_is_tested():
    root = Path(__file__).parents[2]
    assert (root / "examples" / "custom_model.py").read_text() in (root / "docs" / "custom-models.md").read_text()


def test_positions_begin_anew_with_each_document():
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    tokens = torch.zeros(2, 6, dtype=torch.long)
    batch = Batch(tokens, tokens, tokens, documents)
    assert batch.document_positions().tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]
    part = torch.tensor([1, 4])  # of a context-parallel rank, which has the documents whole
    batch = Batch(tokens[:, part], tokens[:, part], tokens[:, part], documents, part)
    assert batch.document_positions().tolist() == [[1, 2], [1, 4]]
    assert Batch(tokens, tokens, tokens).document_positions().tolist() == [[0, 1, 2, 3, 4, 5]]


def test_weights_that_are_tied_across_stages_are_refused():
    """The built-in families refuse them too."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, batch, x=None):
            return x

    split = {"embed": "vocab", "head": "head"}
    family = Family(
        lambda config: Tied(), lambda name, config: DENSE.init(name, config), split, first=("embed",), last=("head",)
    )
    with pytest.raises(UserError, match=r"layout\.pp = 2: .* ties embed\.weight to head\.weight"):
        describe(family, ModelConfig(), Layout(pp=2))
    assert len(describe(family, ModelConfig(), Layout())) == 5
