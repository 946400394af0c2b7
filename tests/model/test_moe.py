"""The moe family against the independent implementation; its router, its experts and their bookkeeping."""

import dataclasses

import pytest
import torch
from torch import nn

from phalanx.core.layout import Coord
from phalanx.core.shape import ModelConfig
from phalanx.model import grouped
from phalanx.model.family import load_family
from phalanx.model.grouped import grouped_linear
from phalanx.model.moe import Experts, MoE, next_bias
from phalanx.parallel.device import Device
from phalanx.parallel.recompute import keep_inputs, keep_products
from phalanx.spec import PRESETS
from phalanx.train.state import State
from tests import reference
from tests.cases import CPU, EVEN, MOE, MOE_ODD, make_batch, make_job

FAMILY = load_family("moe")
EXACT = 1e-12
VARIANTS = {
    "softmax, shared": MOE,
    "sigmoid, odd": MOE_ODD,
    "sigmoid, shared": dataclasses.replace(MOE, scoring="sigmoid", shared_experts=2, balance_bias=0.1),
    "softmax, no dense layer, tied": dataclasses.replace(MOE, dense_layers=0, shared_experts=0, tied=True),
    "every expert": dataclasses.replace(MOE_ODD, top_k=6, balance_loss=0.0),
    "one expert": dataclasses.replace(MOE, top_k=1, expert_dim=0),
}


def whole_model(config):
    """Return the model, its parameters as the reference takes them, and a reference router with the same biases."""
    job = make_job(model=config, micro_batch=2)
    params = {k: v.detach() for k, v in State.create(job, FAMILY, Coord(0, 0, 0), CPU).params.items()}
    model = FAMILY.build(config).double()
    missing, unexpected = model.load_state_dict(params, strict=False)
    assert not unexpected and {name.rpartition(".")[2] for name in missing} <= {"bias", "weight"}
    router = reference.Router(dataclasses.asdict(config))
    generator = torch.Generator().manual_seed(3)
    for name, moe in routed(model).items():
        if moe.bias is not None:
            moe.bias.copy_(0.1 * torch.randn(moe.bias.shape, generator=generator))
            router.bias[int(name.split(".")[1])] = moe.bias.clone()
    return job, model, params, router


def routed(model) -> dict[str, MoE]:
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def backward(model, batch) -> torch.Tensor:
    """Do the backward as the engine does: of the summed loss, whose gradient is multiplied by the batch's scale."""
    logits = model(batch)
    per_token = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BL.flatten(), reduction="none")
    loss = (per_token * batch.weights_BL.flatten()).sum()
    (loss * (1.0 if batch.scale is None else batch.scale)).backward()
    return loss.detach()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_all_gradients_are_those_of_plain_pytorch(config):
    job, model, params, router = whole_model(config)
    batch = make_batch(job, 0, 0)
    batch.scale = batch.even = torch.tensor(1.0 / 29.0, dtype=torch.float64)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    plain = (batch.tokens_BL, batch.targets_BL, batch.weights_BL, batch.documents_BL)
    want = reference.loss_sum(leaves, dataclasses.asdict(config), plain, router)
    ((want + router.balance) / 29.0).backward()
    torch.testing.assert_close(backward(model, batch), want.detach(), rtol=EXACT, atol=0)
    got = dict(model.named_parameters())
    assert set(got) == set(leaves)
    for name, leaf in leaves.items():
        error = (got[name].grad - leaf.grad).norm() / leaf.grad.norm()
        assert error < EXACT, (name, error)
    for name, moe in routed(model).items():
        assert moe.load_E.tolist() == router.load[int(name.split(".")[1])].tolist()


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_parameters_are_counted_exactly(config):
    model = FAMILY.build(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    unused = (config.num_experts - config.top_k) * 3 * config.dim * config.expert_width
    assert config.active_params == config.num_params - len(routed(model)) * unused


def test_published_sizes():
    """Mixtral 8x7B: 46.7 B, and 12.9 B for a token. DeepSeek-V3: 671 B and 37 B with its own attention."""
    mixtral, deepseek = (ModelConfig(**PRESETS[name]) for name in ("mixtral-8x7b", "deepseek-v3-like"))
    assert (round(mixtral.num_params / 1e9, 1), round(mixtral.active_params / 1e9, 1)) == (46.7, 12.9)
    latent = 7168 * (1536 + 576) + 1536 + 512 + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    ours = 7168 * 128 * (2 * 128 + 2 * 8)
    assert round((deepseek.num_params - 61 * (ours - latent)) / 1e9) == 671
    assert int((deepseek.active_params - 61 * (ours - latent)) / 1e9) == 37


# -- the grouped product ----------------------------------------------------------------------------


def product(dtype, counts, widths=(16, 24)):
    """Return output and gradients of a grouped linear of seeded values."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), widths[0], generator=generator).to(dtype).requires_grad_()
    w = torch.randn(len(counts) * widths[1], widths[0], generator=generator).to(dtype).requires_grad_()
    out = grouped_linear(x, w, torch.tensor(counts))
    out.float().square().sum().backward()
    return out.detach(), x.grad, w.grad


def case_kernel_and_loop(args):
    """Run in bf16 and fp32 inside a pool worker, which knows which CPU instructions to avoid."""
    Device.pick("cpu", 0, 1)
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        for counts in ([3, 0, 7, 2], [0, 0, 0, 5], [12, 0, 0, 0]):
            kernel = product(dtype, counts)
            fits, grouped._kernel_fits = grouped._kernel_fits, lambda *_: False
            loop = product(dtype, counts)
            grouped._kernel_fits = fits
            errors += [float((a - b).norm() / b.norm()) for a, b in zip(kernel, loop, strict=True)]
    return errors


def test_the_kernel_computes_what_the_loop_does(pool):
    (errors,) = pool.run("tests.model.test_moe:case_kernel_and_loop", make_job())
    assert max(errors[: len(errors) // 2]) < 1e-6 and max(errors[len(errors) // 2 :]) < 1e-2


def test_the_kernel_is_used_where_it_can_be():
    def fits(dtype, rows, width):
        x, w = torch.empty(rows, width, dtype=dtype), torch.empty(2, 8, width, dtype=dtype)
        return grouped._kernel_fits(x, w.mT)

    assert fits(torch.float32, 3, 16) and fits(torch.bfloat16, 3, 16)
    assert not fits(torch.float64, 3, 16)
    assert not fits(torch.bfloat16, 3, 12) and not fits(torch.float32, 3, 15)  # rows not on 16 bytes
    assert not fits(torch.float32, 0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [[0, 3, 0], [0, 0, 0]])
@pytest.mark.parametrize("width", [16, 15])
def test_experts_without_tokens_have_zero_gradients(dtype, counts, width):
    experts = Experts(3, width, 8).to(dtype)
    for param in experts.parameters():
        nn.init.normal_(param)
    x = torch.randn(sum(counts), width, dtype=dtype, requires_grad=True)
    experts(x, torch.tensor(counts)).sum().backward()  # an expanded gradient, too
    assert x.grad.shape == x.shape
    for param in experts.parameters():
        parts = param.grad.view(3, -1)
        assert [bool(part.any()) for part in parts] == [count > 0 for count in counts]


# -- the router -------------------------------------------------------------------------------------


def layer(config=MOE_ODD, **changes) -> tuple[MoE, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    moe = MoE(dataclasses.replace(config, **changes)).double()
    for param in moe.parameters():
        nn.init.normal_(param, std=0.2, generator=generator)
    x = torch.randn(2, 8, config.dim, dtype=torch.float64, generator=generator)
    return moe, x


def empty_batch():
    return make_batch(make_job(model=EVEN), 0, 0)


def test_the_bias_has_a_say_in_the_choice_only():
    moe, x = layer()
    before = moe(x, empty_batch())
    moe.bias += 3.0  # the same for all
    assert torch.equal(moe(x, empty_batch()), before)
    moe.bias[2] += 10.0
    after = moe(x, empty_batch())
    after.sum().backward()
    assert moe.load_E[2] == 16 and not torch.equal(after, before)
    # For any bias, the weights of a token are in proportion to its scores.
    scores = moe._scores(x)
    ids, weights = moe._choose(scores)
    chosen = scores.gather(-1, ids)
    torch.testing.assert_close(weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


def test_scores_are_computed_in_fp32():
    moe = MoE(MOE).bfloat16()
    nn.init.normal_(moe.gate.weight)
    x = torch.randn(1, 4, MOE.dim, dtype=torch.bfloat16)
    want = (x.float() @ moe.gate.weight.float().T).softmax(-1)
    assert moe._scores(x).dtype == torch.float32
    torch.testing.assert_close(moe._scores(x), want)


def test_the_balance_loss_does_not_depend_on_how_a_batch_is_cut():
    """Given the two functions for it, the loss does not depend on how a sequence is cut either."""

    def gradient(pieces, prepare=lambda moe, i: None):
        moe, x = layer()
        batch = empty_batch()
        batch.scale = torch.tensor(0.25, dtype=torch.float64)
        for i, piece in enumerate(pieces(x)):
            prepare(moe, i)
            (0.0 * moe(piece, batch).sum()).backward()
        return moe.gate.weight.grad

    whole = gradient(lambda x: [x])
    assert whole.norm() > 1e-6
    torch.testing.assert_close(gradient(lambda x: x.split(1)), whole)
    counts = []
    gradient(lambda x: x.split(4, dim=1), lambda moe, i: setattr(moe, "sum_counts", lambda c: counts.append(c) or c))

    def know_the_other(moe, i):
        moe.sum_counts, moe.sequence_length = lambda c: counts[0] + counts[1], lambda length: 2 * length

    torch.testing.assert_close(gradient(lambda x: x.split(4, dim=1), know_the_other), whole)


def test_without_a_scale_the_balance_loss_counts_once():
    moe, x = layer(scoring="softmax")
    (0.0 * moe(x, empty_batch()).sum()).backward()
    scores = moe._scores(x)
    ids, _ = moe._choose(scores)
    share = nn.functional.one_hot(ids, 6).sum((1, 2)) / (8 * 3)
    wanted = 0.02 * 6 * 8 * (share * scores.mean(1)).sum()
    torch.testing.assert_close(moe.gate.weight.grad, torch.autograd.grad(wanted, moe.gate.weight)[0])


def test_an_exchange_may_move_the_rows():
    """Two modules hold half of the experts each, and an exchange sends rows to them and back."""
    moe, x = layer(balance_bias=0.0)
    want = moe(x, empty_batch())
    first, second = (Experts(3, MOE_ODD.dim, 37).double() for _ in range(2))
    for name in ("w1", "w2", "w3"):
        for half, rows in zip((first, second), getattr(moe.experts, name).detach().chunk(2), strict=True):
            getattr(half, name).data = rows
    moe.experts = second

    def exchange(rows, counts):
        near, away = rows.split([int(counts[:3].sum()), int(counts[3:].sum())])
        return away, counts[3:], lambda out: torch.cat((first(near, counts[:3]), out))

    moe.exchange = exchange
    torch.testing.assert_close(moe(x, empty_batch()), want)


# -- the load and the bias --------------------------------------------------------------------------


def test_the_load_is_added_up_over_micro_batches_and_only_in_training():
    moe, x = layer()
    moe(x, empty_batch()).sum().backward()
    once = moe.load_E
    assert once.sum() == 2 * 8 * 3 and once.dtype == torch.int64
    moe(x, empty_batch()).sum().backward()
    assert torch.equal(moe.load_E, 2 * once)
    with torch.no_grad():
        moe(x, empty_batch())
    moe.eval()(x, empty_batch()).sum().backward()
    assert torch.equal(moe.load_E, 2 * once)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_counts_no_token_twice(mode):
    job, model, _, _ = whole_model(MOE_ODD)
    batch = make_batch(job, 0, 0)
    backward(model, batch)
    loads = [moe.load_E for moe in routed(model).values()]
    grads = [p.grad for p in model.parameters()]
    again = whole_model(MOE_ODD)[1]
    units, experts = list(again.layers.values()), [moe.experts for moe in routed(again).values()]
    keep_inputs(units) if mode == "full" else keep_products(units, experts)
    backward(again, batch)
    assert all(map(torch.equal, loads, [moe.load_E for moe in routed(again).values()]))
    assert all(map(torch.equal, grads, [p.grad for p in again.parameters()]))


def test_the_next_bias_goes_towards_the_mean():
    bias = torch.tensor([0.5, -0.25, 0.0, 0.0])
    load = torch.tensor([9, 1, 5, 5])  # the mean is 5
    assert next_bias(bias, load, 0.25).tolist() == [0.25, 0.0, 0.0, 0.0]
    uneven = torch.tensor([3, 4, 3, 3])  # the mean is 3.25
    assert next_bias(torch.zeros(4), uneven, 1.0).tolist() == [1.0, -1.0, 1.0, 1.0]


def test_over_steps_the_bias_is_the_reference_s():
    job, model, params, router = whole_model(MOE_ODD)
    for step in range(3):
        batches = [make_batch(job, step, i) for i in range(2)]
        router.begin()
        for batch in batches:
            reference.forward(params, dataclasses.asdict(MOE_ODD), batch.tokens_BL, batch.documents_BL, router)
            backward(model, batch)
        router.end()
        for name, moe in routed(model).items():
            moe.bias.copy_(next_bias(moe.bias, moe.load_E, MOE_ODD.balance_bias))
            moe.load_E = None
            torch.testing.assert_close(moe.bias, router.bias[int(name.split(".")[1])], rtol=EXACT, atol=EXACT)


def test_following_the_load_evens_it_out():
    moe, x = layer(balance_loss=0.0)
    spread = []
    for _ in range(100):
        moe(x, empty_batch()).sum().backward()
        spread.append(float(moe.load_E.double().std()))
        moe.bias.copy_(next_bias(moe.bias, moe.load_E, 0.01))
        moe.load_E = None
    assert spread[-1] < 0.5 * spread[0]


def test_the_same_bits_twice():
    def run():
        torch.manual_seed(0)
        model = FAMILY.build(dataclasses.replace(MOE, shared_experts=2))
        for param in model.parameters():
            nn.init.normal_(param, std=0.05)
        backward(model, make_batch(make_job(model=MOE, micro_batch=2), 0, 0))
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, run(), run()))
