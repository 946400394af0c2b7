"""Cross-replica traffic in 16 and 8 bits: bytes on the wire and the effect on the loss, on four replicas that learn the
same few batches.

Bar: bf16 sends at most 0.55 and int8 at most 0.30 of the bytes, and the loss after the run is within 2 % of the
uncompressed one."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import dataclasses

from phalanx.core.shape import ModelConfig
from tests.cases import make_job
from tests.pool import Pool

MODEL = ModelConfig(vocab_size=257, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=344)
STEPS, DISTINCT = (2, 2) if SMOKE else (100, 4)
BARS = {"none": 1.0, "bf16": 0.55, "int8": 0.30}


def main():
    options(__doc__).parse_args()
    print(f"{machine()}; replica 4, {MODEL.num_params / 1e6:.2f}M parameters, {STEPS} steps\n")
    print(f"{'codec':8}{'MB/step/rank':>14}{'ratio':>8}{'first loss':>12}{'last loss':>11}")
    figures, ok = {}, True
    with Pool(4) as pool:
        for codec, bar in BARS.items():
            job = make_job(
                (4, 1, 1), model=MODEL, precision="fp32", seq_len=64, steps=STEPS, compress=codec, bucket_mb=0.5
            )
            job = dataclasses.replace(job, optimizer=dataclasses.replace(job.optimizer, lr=1e-3))
            answers = pool.run("benchmarks.exact_cases:losses", job, steps=STEPS, distinct=DISTINCT, timeout=600)
            curve = [sum(a["losses"][i] for a in answers) for i in range(STEPS)]
            last = sum(curve[-DISTINCT:]) / DISTINCT
            mb = sum(a["sent_bytes"] for a in answers) / len(answers) / 1e6
            base = figures.setdefault("none", {"mb": mb, "last": last})
            figures[codec] = {"mb": mb, "last": last}
            ok &= mb <= bar * base["mb"] and abs(last - base["last"]) <= 0.02 * base["last"] and last < curve[0]
            print(f"{codec:8}{mb:14.2f}{mb / base['mb']:8.2f}{curve[0]:12.4f}{last:11.4f}", flush=True)
    rounded = {k: {n: round(v, 4) for n, v in f.items()} for k, f in figures.items()}
    finish("compression", ok, **rounded)


if __name__ == "__main__":
    main()
