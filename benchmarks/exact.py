"""The exact reduction: the same bits over every split of the data-parallel axis, and its price
against the fast one in CPU-seconds, bytes on the wire and memory.

Bar: one hash over all layouts for weights and one for the optimizer's moments, in fp32 and in bf16,
at TP 1 and at TP 2, with clipping active in every step; and the fast reduction gives several."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import statistics
import tempfile
from pathlib import Path

from phalanx.core.shape import ModelConfig
from tests.cases import ODD, assemble, fingerprint, make_job
from tests.pool import Pool

LAYOUTS = {
    1: [(1, 1), (1, 2), (1, 4), (2, 2), (4, 1), (2, 4), (1, 8)],
    2: [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)],
}
PRICED = [((1, 4), 1), ((1, 4), 3), ((2, 2), 3), ((4, 1), 3)]  # replica x shard, ZeRO
DIM, SEQ_LEN = 256, 128
STEPS, PRICE_STEPS = 10, 16
if SMOKE:
    LAYOUTS, PRICED = {2: [(1, 1), (1, 2)]}, [((2, 2), 3)]
    DIM, SEQ_LEN, STEPS, PRICE_STEPS = 32, 16, 2, 2
PRICE_MODEL = ModelConfig(vocab_size=257, dim=DIM, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=688)


def hashes(pool, precision, tp, reduction):
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        for replica, shard in LAYOUTS[tp]:
            job = make_job(
                (replica, shard, tp),
                model=ODD,
                precision=precision,
                reduction=reduction,
                steps=STEPS,
                global_batch=8,
            )
            stem = str(Path(folder) / "run")
            answers = pool.run("tests.cases:case_train", job, stem=stem, steps=STEPS)
            clipped = all(float.fromhex(n) > job.optimizer.clip for n in answers[0]["norms"])
            seen[replica, shard] = (fingerprint(assemble(job, stem)), clipped)
    return seen


def show_hashes(pool):
    print(f"SHA-256 (first 16 digits) of weights and moments after {STEPS} clipped steps\n")
    ok = True
    for precision in ("fp32", "bf16"):
        for tp in LAYOUTS:
            exact = hashes(pool, precision, tp, "exact")
            fast = hashes(pool, precision, tp, "fast")
            print(f"{precision}, TP {tp}{'exact weights':>26}{'moments':>18}{'fast weights':>20}")
            for layout in LAYOUTS[tp]:
                e, f = exact[layout][0], fast[layout][0]
                name = f"replica {layout[0]} x shard {layout[1]}"
                print(f"  {name:22}{e['weights']:>18}{e['moments']:>18}{f['weights']:>20}")
            kinds = {k: len({e[k] for e, _ in exact.values()}) for k in ("weights", "moments")}
            others = len({f["weights"] for f, _ in fast.values()})
            clipped = all(c for _, c in exact.values())
            print(f"  distinct: exact {kinds['weights']} and {kinds['moments']}, fast {others}\n", flush=True)
            ok &= kinds == {"weights": 1, "moments": 1} and others > 1 and clipped
    return ok


def show_price(pool):
    print(f"price of exact, {PRICE_MODEL.num_params / 1e6:.1f}M parameters, 8 micro-batches per step, fp32")
    head = f"{'layout':30}{'CPU-s fast':>12}{'exact':>8}{'ratio':>7}{'MB sent fast':>14}{'exact':>8}{'ratio':>7}"
    print(head + f"{'MB kept':>10}")
    figures = {}
    for (replica, shard), zero in PRICED:
        job = make_job((replica, shard, 1), model=PRICE_MODEL, precision="fp32", seq_len=SEQ_LEN, zero=zero, steps=100)
        answers = pool.run("benchmarks.exact_cases:price", job, steps=PRICE_STEPS, timeout=600)

        def middle(kind, what, answers=answers):
            return statistics.median(sum(a[kind][what][i] for a in answers) for i in range(PRICE_STEPS))

        cpu = {k: middle(k, "cpu_s") for k in ("fast", "exact")}
        sent = {k: middle(k, "sent_bytes") / 1e6 for k in ("fast", "exact")}
        kept = max(a["exact"]["pending_bytes"] for a in answers) / 1e6
        name = f"replica {replica} x shard {shard}, ZeRO-{zero}"
        print(
            f"{name:30}{cpu['fast']:12.2f}{cpu['exact']:8.2f}{cpu['exact'] / cpu['fast']:7.2f}"
            f"{sent['fast']:14.1f}{sent['exact']:8.1f}{sent['exact'] / sent['fast']:7.2f}{kept:10.1f}",
            flush=True,
        )
        figures[name] = {"cpu": round(cpu["exact"] / cpu["fast"], 3), "bytes": round(sent["exact"] / sent["fast"], 3)}
    print(
        f"\nMB sent: all ranks, per step, counted by the kernel, parameter gathers included. MB kept: partial\n"
        f"sums a rank holds at most (its own gradients: {PRICE_MODEL.num_params * 4 / 1e6:.1f} MB whole)."
    )
    return figures


def main():
    options(__doc__).parse_args()
    print(machine() + "\n")
    with Pool(8) as pool:
        ok = show_hashes(pool)
        figures = show_price(pool)
    finish("exact", ok, price=figures)


if __name__ == "__main__":
    main()
