"""Import and export of every supported class of `transformers`, as a tiny random model in fp64: our logits and
gradients against theirs (whose casts to fp32 are made casts to fp64, tests/hf_models.py), our export loaded by them,
and the same model in, out and in again. Then the refusals, with their reasons.

Bar: errors at most 1e-10 in at least 10 classes; weights and config in, out and in again are equal. Needs the package
transformers."""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import sys

from phalanx.checkpoint.hf_config import ARCHITECTURES, OTHERS
from tests.hf_models import MODELS, compare

BAR = 1e-10


def main():
    options(__doc__).parse_args()
    try:
        import transformers
    except ImportError:
        sys.exit("hf_parity.py needs the package transformers: pip install transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = ["Llama 3.1", "Gemma 2"] if SMOKE else list(MODELS)
    print(f"norm-relative errors in fp64; transformers {transformers.__version__}; {machine()}\n")
    head = f"{'model':28}{'class in':24}{'logits':>10}{'gradients':>11}{'exported':>10}  {'in, out, in':13}verdict"
    print(head + "\n" + "-" * len(head))
    worst, good = 0.0, set()
    wrong = []
    for name in names:
        row = compare(transformers, name)
        errors = row["logits"], row["gradients"], row["logits_out"]
        equal = row["same_weights"] and row["same_config"]
        ok = max(errors) <= BAR and equal
        worst = max(worst, *errors)
        (good.add(row["class"]) if ok else wrong.append(name))
        figures = f"{errors[0]:10.1e}{errors[1]:11.1e}{errors[2]:10.1e}"
        told = "ok" if ok else "WRONG"
        print(f"{name:28}{row['class']:24}{figures}  {'equal' if equal else 'DIFFERENT':13}{told}", flush=True)
    print("\nrefused, with the reason:")
    for name, why in OTHERS.items():
        print(f"  {name}: {why}")
    lacking = sorted(set(ARCHITECTURES) - good)
    enough = SMOKE or (len(good) >= 10 and not lacking)
    print(f"\n{len(good)} classes, {len(names)} models, {len(wrong)} wrong; worst {worst:.1e}")
    finish("hf_parity", not wrong and enough, classes=len(good), models=len(names), worst=worst, lacking=lacking)


if __name__ == "__main__":
    main()
