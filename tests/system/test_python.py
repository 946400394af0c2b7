"""The library as a user calls it: the script of docs/python.md, and the promises around it."""

import importlib
import inspect
import json
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.run import library
from phalanx.run.notebook import closure
from phalanx.train.sampler import Sampler
from tests.system.command import phalanx as command

DOCS = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_script_of_the_page_runs(tmp_path):
    script = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
    assert len([line for line in script.splitlines() if line.strip()]) <= 30
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(400)))
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    loss, *rest = done.stdout.splitlines()[-1].split()
    assert 0 < float(loss) < 6 and "{'best_so_far':" in rest
    first, second = (phalanx.Run(path) for path in sorted((tmp_path / "runs").glob("mine-*")))
    assert [row["step"] for row in first.metrics + second.metrics] == list(range(9))
    assert [event["step"] for event in first.validations] == [3, 6]
    assert second.checkpoints[0].step == 9 and any(each.best for each in second.checkpoints)
    weights = second.weights()
    assert weights["embed.weight"].shape == (257, 32) and len(weights) == 7
    sampler = Sampler(second.checkpoints[0].path)
    once, again = ([list(sampler.write("3 times", 4, seed=seed)) for seed in range(8)] for _ in range(2))
    assert once == again and 1 <= max(map(len, once)) <= 4  # a document may end at once
    texts = [command(tmp_path, "generate", second.path, "3 times", "--tokens", 6, "--seed", seed) for seed in (1, 1, 2)]
    assert all(text.returncode == 0 and text.stdout.startswith("3 times") for text in texts), texts
    assert texts[0].stdout == texts[1].stdout
    assert second.summary["epochs"] == {"text.txt": pytest.approx(1.5 * first.summary["epochs"]["text.txt"])}
    (file,) = (tmp_path / "runs" / ".families").iterdir()
    assert "phalanx.train(" not in file.read_text()


def test_importing_a_module_of_the_room_leaves_train_callable():
    before = phalanx.train
    room = importlib.import_module("phalanx.train.optimizer")
    assert phalanx.train is before and callable(phalanx.train) and phalanx.train.optimizer is room


def test_help_tells_how_train_is_called():
    want = inspect.signature(library.train)
    assert inspect.signature(phalanx.train) == want and "resume" in want.parameters
    text = pydoc.render_doc(phalanx.train, renderer=pydoc.plaintext)
    assert "resume: " in text and "Run a job on this machine to its end." in text


HOOKS = """
import json, phalanx

JOB = {
    "name": "hooked", "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 32}, "layout": {"ranks": 1},
    "train": {"steps": 4, "seq_len": 32, "global_batch": 2}, "data": {"source": "text.txt"},
    "checkpoint": {"every_steps": 2, "dir": "checkpoints"}, "validation": {"held_out": 0.2, "every_steps": 2},
}
seen = []

def fail(row):
    raise LookupError(row["step"])

for steps in (2, 4):
    run = phalanx.train(
        JOB,
        [f"train.steps={steps}"],
        resume="auto",
        on_checkpoint=lambda event: seen.append(["checkpoint", event["step"]]),
        on_validation=lambda event: seen.append(["validation", event["step"]]),
        quiet=True,
    )
oldest = run.checkpoints[-1]
try:
    phalanx.train(JOB, ["checkpoint.dir=branch"], resume=oldest, on_step=fail, quiet=True)
except LookupError as error:
    print(json.dumps({"seen": sorted(seen), "oldest": oldest.step, "failed_at": error.args[0]}))
"""


def test_hooks_are_called_and_what_they_raise_is_raised(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(400)))
    (tmp_path / "script.py").write_text(HOOKS)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [step for kind, step in said["seen"] if kind == "checkpoint"] == [2, 4]
    # A run that continues begins with the validation of where it continues.
    assert [step for kind, step in said["seen"] if kind == "validation"] == [2, 2, 4]
    assert said["failed_at"] == said["oldest"] == 2, "it goes on from the checkpoint that was given, not the newest"


def test_a_family_of_a_notebook_takes_what_it_reads_and_nothing_else():
    cells = [
        "import math\nimport torch as t\nfrom torch import nn",
        "%matplotlib inline",
        "WIDTH = 4\nunused = print('side effect')",
        "class Part(nn.Module):\n    def forward(self, x):\n        run = x * WIDTH\n        return run",
        "@staticmethod\ndef build(config):\n    return Part()",
        "run = train(FAMILY)",
        "FAMILY = Family(build, lambda name, c: Init(math.pi))",
        "if __name__ == '__main__':\n    FAMILY = None",
    ]
    text = closure(cells, "FAMILY")
    for part in ("import math", "from torch import nn", "WIDTH = 4", "class Part", "@staticmethod", "FAMILY = Family"):
        assert part in text
    for part in ("side effect", "run = train", "torch as t", "__main__", "matplotlib"):
        assert part not in text
