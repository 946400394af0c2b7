"""Scaling efficiency from 8 to 1,048,576 H100 for a model of 405B and one of 1T parameters, including failures: laid
out well (the planner's best, contained failures) and badly (one flat ring, every failure stops the job). The batch
grows with the cluster. Published: below 80 % beyond 16k GPUs without care, below 50 % beyond 8,192 when done badly.

Bar: well done, at least 80 % at every size beyond 16k; badly done, below 50 % from 8,192 on.

    benchmarks/twin_scaling.py [--svg FOLDER] [--smoke]"""

from common import SMOKE, finish, machine, options  # isort: skip

from pathlib import Path

from phalanx.cli.plan_ask import Options, request
from phalanx.hardware import load
from phalanx.twin.scaling import SIZES, curves, picture, text

MODELS = ("llama3-405b",) if SMOKE else ("llama3-405b", "dense-1t")
# The page's style, for a picture that stands alone.
STYLE = (
    "<style>svg{--c0:#0072b2;--c4:#d55e00;font:12px system-ui,sans-serif;background:#fff}"
    "text{fill:#222}.dim{fill:#666}.axis{stroke:#888}</style>"
)


def main():
    parser = options(__doc__)
    parser.add_argument("--svg", type=Path, help="folder for a picture of each model")
    args = parser.parse_args()
    catalogue, rows, ok = load(), {}, True
    print(f"{machine()}\n")
    for model in MODELS:

        def at(chips, model=model):
            return request(Options(model, chips, "h100"), catalogue.cluster("h100", chips))

        found = curves(at, SIZES[4:8] if SMOKE else SIZES)
        print("\n".join(text(found)), end="\n\n", flush=True)
        well, badly = found.efficiency("well"), found.efficiency("badly")
        beyond = [share for chips, share in well.items() if chips > 16_384]
        bad = max((share for chips, share in badly.items() if chips >= 8192), default=1.0)
        ok = ok and min(beyond, default=0.0) >= 0.8 and bad < 0.5
        rows[model] = {
            "well": {str(n): round(s, 3) for n, s in well.items()},
            "badly": {str(n): round(s, 3) for n, s in badly.items()},
            "least_well_beyond_16k": round(min(beyond, default=0.0), 3),
            "most_badly_from_8192": round(bad, 3),
        }
        if args.svg:
            (args.svg / f"scaling-{model}.svg").write_text(picture(found, STYLE) + "\n", encoding="utf-8")
    finish("twin_scaling", ok, models=rows)


if __name__ == "__main__":
    main()
