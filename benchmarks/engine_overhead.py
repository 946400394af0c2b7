"""Our engine against a plain FSDP2 loop: same ranks, same mesh, same model, same batches, in turns. The measure is
CPU-seconds per step over all ranks, because wall time on a shared machine measures its neighbours.

Bar: the upper end of the 95 % interval of the ratio is at most 1.05."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import statistics

from phalanx.core.shape import ModelConfig
from tests.cases import make_job
from tests.pool import Pool

BAR = 1.05
PAIRS, LAYERS, DIM, SEQ_LEN = (2, 2, 64, 32) if SMOKE else (40, 8, 256, 256)
MODEL = ModelConfig(vocab_size=257, dim=DIM, num_layers=LAYERS, num_heads=8, num_kv_heads=4, ffn_dim=688)


def main():
    options(__doc__).parse_args()
    job = make_job(
        (1, 4, 1), model=MODEL, precision="fp32", seq_len=SEQ_LEN, global_batch=4, micro_batch=1, clip=1.0, steps=1000
    )
    with Pool(4) as pool:
        answers = pool.run("benchmarks.overhead_cases:interleaved", job, pairs=PAIRS, timeout=1500)
    ours = [sum(a["ours"][i] for a in answers) for i in range(PAIRS)]
    plain = [sum(a["plain"][i] for a in answers) for i in range(PAIRS)]
    ratios = [o / p for o, p in zip(ours, plain, strict=True)]
    middle, low, high = bootstrap(ratios)
    same = max(a["loss_difference"] for a in answers) < 1e-4  # over the warm-up steps: both compute the same
    ok = high <= BAR and same
    print(f"plain FSDP2 loop beside the engine, {job.layout.describe()}, {MODEL.num_params / 1e6:.1f}M parameters")
    print(f"on {machine()}; {PAIRS} interleaved pairs\n")
    print(f"{'':24}{'plain':>10}{'ours':>10}")
    print(f"{'CPU-seconds per step':24}{statistics.median(plain):10.3f}{statistics.median(ours):10.3f}")
    walls = [
        statistics.median(max(a[f"{k}_wall"][i] for a in answers) for i in range(PAIRS)) for k in ("plain", "ours")
    ]
    print(f"{'wall seconds per step':24}{walls[0]:10.3f}{walls[1]:10.3f}")
    print(f"\nratio of CPU-seconds: {middle:.3f}, 95 % interval {low:.3f} to {high:.3f}; bar {BAR}")
    finish(
        "engine_overhead",
        ok,
        ratio=round(middle, 4),
        low=round(low, 4),
        high=round(high, 4),
        pairs=PAIRS,
        wall_ratio=round(walls[1] / walls[0], 4),
    )


if __name__ == "__main__":
    main()
