"""The cost of letting replicas drift apart: one small model trained on real processes, on the same samples, by

    sync      one gradient of all ranks per step
    local     semi-synchronous: steps of its own, averaged every EVERY steps (arXiv:2311.08105)
    server    a parameter server: no rank waits for another, and gradients are some updates old

Each uses the better of two learning rates. It prints the loss on held-out text after the same number of samples, and
how many samples the synchronous run needs for that loss.

Bar: none of the others reaches the loss of the synchronous run sooner, and the loss grows with the age of gradients."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

from phalanx.core.shape import ModelConfig
from tests.cases import make_job
from tests.pool import Pool

RANKS, STEPS, LOOK, EVERY, RATES = (2, 4, 2, 2, (3e-3,)) if SMOKE else (4, 120, 10, 20, (3e-3, 1e-2))
MODEL = ModelConfig(vocab_size=257, dim=32, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=86)
OLDER = (0, 4) if SMOKE else (0, 28)  # added to the age that comes from the ranks themselves
WAYS = {
    "sync": {"way": "sync"},
    f"local, every {EVERY}": {"way": "local"},
    **{f"server, {RANKS - 1 + older} updates old": {"way": "server", "older": older} for older in OLDER},
}


def samples_for(curve: dict[int, float], loss: float) -> float:
    """Return the step at which a curve first reaches a loss, interpolated linearly between evaluations."""
    last, before = 0, float("inf")
    for step, now in sorted(curve.items()):
        if now <= loss:
            share = (before - loss) / (before - now) if before < float("inf") else 1.0
            return last + share * (step - last)
        last, before = step, now
    return float(last)


def main():
    options(__doc__).parse_args()
    job = make_job((1, RANKS, 1), model=MODEL, precision="fp32", seq_len=32, global_batch=8 * RANKS, micro_batch=8)
    best: dict[str, dict[int, float]] = {}
    print(f"{RANKS} ranks, {MODEL.num_params:,} parameters, {STEPS} steps of {8 * RANKS} sequences; {machine()}\n")
    with Pool(RANKS) as pool:
        for name, how in WAYS.items():
            for lr in RATES:
                more = {"older": 0, "every": EVERY, "steps": STEPS, "look": LOOK, **how, "lr": lr}
                curve = pool.run("benchmarks.staleness_cases:train", job, timeout=1500, **more)[0]
                curve = {int(step): loss for step, loss in curve.items()}
                print(f"{name}, learning rate {lr:g}: {curve[STEPS]:.3f}", flush=True)
                if name not in best or curve[STEPS] < best[name][STEPS]:
                    best[name] = curve
    base = best["sync"]
    print(f"{'':26}{'loss':>8}{'beyond sync':>13}{'samples, of those that sync needs':>36}")
    rows = {}
    for name, curve in best.items():
        rows[name] = (curve[STEPS], STEPS / samples_for(base, curve[STEPS]))
        print(f"{name:26}{curve[STEPS]:8.3f}{curve[STEPS] - base[STEPS]:13.3f}{rows[name][1]:36.2f}")
    losses = [loss for loss, _ in rows.values()]
    ok = losses[0] <= min(losses[1:]) and losses[2] <= losses[3]
    finish("staleness", ok, losses={k: round(v[0], 4) for k, v in rows.items()},
           samples={k: round(v[1], 3) for k, v in rows.items()})  # fmt: skip


if __name__ == "__main__":
    main()
