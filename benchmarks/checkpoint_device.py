"""The cost of a snapshot on an accelerator: one rank copies about 30 GB of state (weights, two moments, fp32) to host
memory during the next forward and backward pass. The device's own copy speed into the same pinned memory is measured
first, alone and then during the same pass, where it is some percent slower. The time by which such a bare copy, without
checks and hand-over, lengthens the step is the blocking time that the bandwidth allows. The copy alone minus the
forward and backward pass is printed too ("ideal").

There are two step lengths: one whose forward and backward pass outlasts the copy (nothing need be waited for), and one
that is much shorter (the rest of the copy must be).

Bar: with the short step, blocking <= 1.2 x the bare copy's; with the long one, where nothing need be waited for, the
step is at most 5 % of the copy longer than with a bare copy. Without an accelerator there is no copy to hide, and only
the smoke mode is useful."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import secrets
import statistics
import tempfile

from phalanx.core.job import Job, RunConfig, TrainConfig
from phalanx.core.shape import ModelConfig
from phalanx.gate.proof import KEY_BYTES
from tests.pool import Pool

LARGE = ModelConfig(vocab_size=32_000, dim=3072, num_layers=24, num_heads=24, num_kv_heads=8, ffn_dim=8192)
SMALL = ModelConfig(vocab_size=512, dim=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=704)

KEEPER, TIMES = -3, 1 if SMOKE else 5


def main():
    options(__doc__).parse_args()
    print(f"a snapshot on an accelerator; {machine()}")
    lengths = {"short": 1, "long": 2} if SMOKE else {"short": 1, "long": 8}
    seq_len = 128 if SMOKE else 8192  # long enough that the device has more to do than the host
    train = TrainConfig(
        steps=1000,
        seq_len=seq_len,
        global_batch=1,
        micro_batch=1,
        precision="fp32" if SMOKE else "bf16",
        document_mask=False,
    )
    job = Job(model=SMALL if SMOKE else LARGE, train=train, run=RunConfig(device="auto"))
    with Pool(1) as pool, tempfile.TemporaryDirectory(dir=".") as folder:
        peers = {"key": secrets.token_hex(KEY_BYTES)}
        keeping = dict(url=folder, ranks=1, keep_last=1, keep_every=0, peers=peers, host="127.0.0.1", has_buddy=False)
        pool._spawn(KEEPER, "phalanx.checkpoint.keeper:main", keeping)
        keeper = pool._wait({KEEPER}, 60)[KEEPER]["address"]
        function = "benchmarks.checkpoint_device_cases:snapshots"
        got = pool.run(function, job, timeout=500, keeper=keeper, lengths=list(lengths.values()), times=TIMES)[0]
    names = {"state GB": 10, "copy s": 8, "GB/s": 8, "fwd+bwd s": 11, "ideal s": 9}
    names |= {"bare copy s": 13, "blocking s": 12, "host ms": 9}
    head = f"{'step':8}" + "".join(f"{name:>{width}}" for name, width in names.items())
    print("\n" + head + "\n" + "-" * len(head))
    figures, size, ok = {}, got["bytes"], True
    for name, micro in lengths.items():
        r = got["rows"][str(micro)]
        copy, passes = min(r["copy_s"]), statistics.median(r["passes_s"])
        plain = statistics.median(r["plain_s"])
        bare, blocking = statistics.median(r["raw_s"]) - plain, statistics.median(r["with_s"]) - plain
        ideal = max(0.0, copy - passes)
        bar = 1.2 * bare if ideal else bare + 0.05 * copy
        ok = ok and blocking <= bar
        cells = f"{size / 1e9:10.2f}{copy:8.3f}{size / copy / 1e9:8.1f}{passes:11.3f}{ideal:9.3f}{bare:13.3f}"
        print(f"{name:8}{cells}{blocking:12.3f}{statistics.median(r['host_s']) * 1e3:9.1f}")
        figures[name] = {"copy_s": copy, "passes_s": passes, "ideal_s": ideal, "bare_s": bare, "blocking_s": blocking}
        figures[name]["hash_s"] = statistics.median(r["hash_s"])
    print(f"hashed and sealed by the keeper {figures['short']['hash_s']:.2f} s after a short step")
    finish("checkpoint_device", ok, device=got["device"], bytes=size, **figures)


if __name__ == "__main__":
    main()
