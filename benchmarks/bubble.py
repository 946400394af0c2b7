"""The pipeline's bubble, measured and compared with the formula: 4 stages' ranks, 8 and 16 micro-batches, every
schedule, stages that sleep and stages that compute. A rank's bubble is the share of the step in which it waits for a
neighbour. The figure is the mean over ranks, median of several steps; the smallest of the steps is shown for
orientation.

With p ranks, m micro-batches and v chunks on a rank:
  GPipe, 1F1B                    (p - 1) / (m + p - 1)
  interleaved                    (p - 1) / (v m + p - 1)
  interleaved zero-bubble, ZB-V  (p - 1) / (3 v m + p - 1) where a forward and the two halves of a backward
                                 take the same time, as the sleeps do

Computing stages run the engine's own forwards and backwards. The formula is about equal stages, so each piece is padded
to the time of the slowest rank; with fewer cores than ranks, it is padded so that every rank gets its turn. The two
halves of a computed backward do not take as long as a forward, so there the prediction simulates the schedule with the
median time of each kind of work.

Bar: measured within 10 % of the prediction, everywhere. `bubble.py sleep` or `bubble.py compute` runs half of it."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import os
import statistics

from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.parallel.pipeline import Kind, order
from tests.cases import make_job
from tests.pool import Pool

PP, TIMES = 4, 1 if SMOKE else 3
NUM_MICRO = (4,) if SMOKE else (8, 16)
# How long the forward of a whole stage sleeps; the sequence length of computing stages.
SLEEP_S, SEQ_LEN = (0.004, 16) if SMOKE else (0.12, 256)
LONGER = 2  # times as long for schedules whose bubble is so small that message latency would show in it
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv")
DIM, FFN_DIM = (32, 64) if SMOKE else (512, 1408)
MODEL = ModelConfig(vocab_size=32, dim=DIM, num_layers=8, num_heads=8, num_kv_heads=8, ffn_dim=FFN_DIM)
SLOT, SLOT_CROWDED = 2.0, 3.0  # times the CPU time; the second with fewer cores than ranks


def slot():
    return SLOT if len(os.sched_getaffinity(0)) >= PP else SLOT_CROWDED


def formula(layout, num_micro):
    p, v = layout.pp, layout.num_chunks
    return (p - 1) / ((3 if layout.splits_backward else 1) * v * num_micro + p - 1)


NAMES = {
    Kind.FORWARD: "F",
    Kind.FULL_BACKWARD: "both",
    Kind.BACKWARD_INPUT: "inputs",
    Kind.BACKWARD_WEIGHT: "weights",
}


def play(layout, num_micro, seconds):
    """Simulate the schedule with these times for each kind of work, and none for messages. Return the mean share of the
    whole in which a rank is idle."""
    todo = {r: [a for a in actions if a.computation_type in NAMES] for r, actions in order(layout, num_micro).items()}
    clock, done, busy = dict.fromkeys(todo, 0.0), {}, dict.fromkeys(todo, 0.0)
    while any(todo.values()):
        for rank, actions in todo.items():
            while actions:
                stage, kind, micro = actions[0].stage_index, actions[0].computation_type, actions[0].microbatch_index
                needs = {
                    Kind.FORWARD: ("forward", stage - 1, micro) if stage else None,
                    Kind.BACKWARD_WEIGHT: None,
                }.get(kind, ("backward", stage + 1, micro) if stage < layout.num_stages - 1 else None)
                if needs and needs not in done:
                    break
                took = seconds[NAMES[kind]]
                clock[rank] = max(clock[rank], done.get(needs, 0.0)) + took
                busy[rank] += took
                if kind != Kind.BACKWARD_WEIGHT:
                    done["forward" if kind == Kind.FORWARD else "backward", stage, micro] = clock[rank]
                actions.pop(0)
    total = max(clock.values())
    return statistics.mean(1 - b / total for b in busy.values())


def measure(pool, kind, schedule, num_micro):
    axes = dict(pp=PP, schedule=schedule)
    longer = LONGER if Layout(**axes).splits_backward else 1
    fixed = dict(precision="fp32", document_mask=False, seq_len=SEQ_LEN * longer)
    job = make_job(model=MODEL, axes=axes, global_batch=num_micro, **fixed)
    if kind == "sleep":
        extra = dict(seconds=SLEEP_S * longer / job.layout.num_chunks)
    else:
        extra = dict(slot=slot())
    function = f"benchmarks.bubble_cases:{'sleeps' if kind == 'sleep' else 'compute'}"
    ranks = pool.run(function, job, times=TIMES, timeout=300, **extra)
    steps = [[rank[step] for rank in ranks] for step in range(TIMES)]
    got = [statistics.mean(row["idle"] / row["total"] for row in rows) for rows in steps]
    work: dict = {}
    for name, _, _, took in (piece for rows in steps for row in rows for piece in row["work"]):
        work.setdefault(name, []).append(took)
    work = {name: statistics.median(took) for name, took in work.items()}
    closed = expected = formula(job.layout, num_micro)
    if kind == "compute" and job.layout.splits_backward:
        expected = play(job.layout, num_micro, work)
    return statistics.median(got), expected, min(got), closed, work


def main():
    parser = options(__doc__)
    parser.add_argument("kind", nargs="?", choices=("sleep", "compute"), help="one half alone")
    only = parser.parse_args().kind
    print(f"bubble of the pipeline, {PP} ranks; {machine()}")
    print(f"computed work is padded to {slot()} times the slowest rank's CPU time")
    names = ("least", "formula", "expected", "measured")
    head = f"{'work':9}{'schedule':17}{'m':>4}{'F ms':>8}{'B ms':>8}{''.join(f'{n:>10}' for n in names)}{'ratio':>8}"
    print("\n" + head + "\n" + "-" * len(head))
    worst, rows = 0.0, []
    with Pool(PP) as pool:
        for kind in (only,) if only else ("sleep", "compute"):
            for schedule in SCHEDULES:
                for num_micro in NUM_MICRO:
                    got, expected, least, closed, work = measure(pool, kind, schedule, num_micro)
                    back = sum(v for k, v in work.items() if k != "F")
                    ratio = got / expected
                    worst = max(worst, abs(ratio - 1))
                    rows.append((kind, schedule, num_micro, round(got, 4), round(expected, 4)))
                    shares = "".join(f"{share:10.1%}" for share in (least, closed, expected, got))
                    times = f"{work['F'] * 1e3:8.1f}{back * 1e3:8.1f}"
                    print(f"{kind:9}{schedule:17}{num_micro:4}{times}{shares}{ratio:8.2f}", flush=True)
    print(f"\nlargest deviation {worst:.1%}")
    finish("bubble", worst <= 0.10, worst=worst, slot=slot(), rows=rows)


if __name__ == "__main__":
    main()
