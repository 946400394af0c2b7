"""Every composition against plain PyTorch and against our own single process, in fp64 and fp32: the largest
norm-relative error of any parameter's gradient after one step and weight after five.

Bar: fp64 at most 1e-10, everywhere. fp32 is shown for orientation. An argument selects a part of the table: `parity.py
0:40` runs the first forty rows, `parity.py moe` those with that in their name."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

from tests.cases import CASES, make_job
from tests.parity import TOLERANCE, References, run_case
from tests.pool import Pool


def wanted(part: str) -> list:
    if SMOKE:
        part = part or "shard 2 x tp 2, ZeRO-1"
    first, colon, last = part.partition(":")
    if colon and (first + last).isdigit():
        return CASES[int(first or 0) : int(last or len(CASES))]
    return [case for case in CASES if part in case[0]]


def main():
    parser = options(__doc__)
    parser.add_argument("part", nargs="?", default="", help="rows FROM:TO of the table, or what is in their names")
    part = parser.parse_args().part
    print(f"norm-relative errors of gradients (1 step) and weights (5 steps); {machine()}\n")
    head = f"{'composition':56}{'ranks':>6}{'fp64 grads':>12}{'weights':>10}{'fp32 grads':>12}{'weights':>10}  verdict"
    print(head + "\n" + "-" * len(head))
    worst, failed = {"fp64": 0.0, "fp32": 0.0}, []
    cases = wanted(part)
    with Pool(8) as pool:
        references = References(pool)
        for name, layout, changes in cases:
            cells, ok = [], True
            for precision in ("fp64", "fp32"):
                errors = run_case(pool, references, layout, changes | {"precision": precision})["errors"]
                for what in ("grads", "weights"):
                    cells.append(max(errors[f"plain-{what}"], errors[f"single-{what}"]))
                if precision == "fp64":
                    ok = max(errors.values()) <= TOLERANCE["fp64"]
                worst[precision] = max(worst[precision], *cells[-2:])
            if not ok:
                failed.append(name)
            ranks = make_job(layout, **changes).layout.world_size
            figures = f"{cells[0]:12.1e}{cells[1]:10.1e}{cells[2]:12.1e}{cells[3]:10.1e}"
            print(f"{name:56}{ranks:6}{figures}  {'ok' if ok else 'WRONG'}", flush=True)
    print(f"\n{len(cases)} compositions, {len(failed)} wrong; worst fp64 {worst['fp64']:.1e}, fp32 {worst['fp32']:.1e}")
    finish("parity", not failed, compositions=len(cases), worst_fp64=worst["fp64"], worst_fp32=worst["fp32"])


if __name__ == "__main__":
    main()
