"""Run compositions against the references, and reduce the answers to one error per comparison."""

import dataclasses
import math
import tempfile
from pathlib import Path

import numpy as np

from phalanx.core.job import CollectivesConfig
from phalanx.core.layout import Layout
from tests import cases, reference

TOLERANCE = {"fp64": 1e-10, "fp32": 2e-4}


# Settings that must not change a number, and are left out of the references.
PLAIN = dict(
    reduction="fast", recompute="none", compile="none", compress="none", offload_activations=False, bucket_mb=25.0
)


class References:
    """The runs of the independent implementation and of our own single process, one file each per distinct piece of
    work (ignoring the layout), computed once."""

    def __init__(self, pool):
        self.pool, self.folder, self.made = pool, tempfile.TemporaryDirectory(), {}

    def of(self, job) -> dict:
        single = dataclasses.replace(
            job,
            layout=Layout(),
            collectives=CollectivesConfig(),
            train=dataclasses.replace(job.train, **PLAIN),
            optimizer=dataclasses.replace(job.optimizer, state="full", offload="none"),
        )
        key = single.digest()
        if key not in self.made:
            stem = str(Path(self.folder.name) / key)
            self._plain(single, stem)
            self.pool.run("tests.cases:case_save", single, stem=stem)
            kinds = ("plain-grads", "plain-weights", "single-grads", "single-weights")
            self.made[key] = {kind: f"{stem}-{kind}.npz" for kind in kinds}
        return self.made[key]

    def _plain(self, job, stem):
        weights, steps = cases.reference_inputs(job)
        grads, losses, norms, last = reference.train(
            weights, dataclasses.asdict(job.model), dataclasses.asdict(job.optimizer), steps
        )
        cases.save(f"{stem}-plain-grads.npz", grads)
        cases.save(f"{stem}-plain-weights.npz", last)
        np.savez(f"{stem}-plain-scalars.npz", losses=np.array(losses), norms=np.array(norms))

    def scalars(self, job):
        path = self.of(job)["plain-grads"].replace("grads", "scalars")
        return np.load(path)


def worst_error(job, answers, kind) -> float:
    """Return the largest norm-relative error of any parameter in any replica."""
    worst = 0.0
    for replica in range(job.layout.replica):
        ranks = [a for r, a in enumerate(answers) if job.layout.coord(r).replica == replica]
        for name in {name for a in ranks for name in a[kind]}:
            difference, norm = (sum(a[kind][name][i] for a in ranks if name in a[kind]) for i in (0, 1))
            worst = max(worst, math.sqrt(difference / norm) if norm else math.inf)
    return worst


def run_case(pool, references, layout, options) -> dict:
    job = cases.make_job(layout, **options)
    files = references.of(job)
    answers = pool.run("tests.cases:case_parity", job, references=files)
    errors = {kind: worst_error(job, answers, kind) for kind in files}
    scalars = references.scalars(job)
    tokens = sum(int(cases.make_batch(job, 0, i).weights_BL.sum()) for i in range(job.num_micro))
    first = math.fsum(x for r, a in enumerate(answers) if job.layout.coord(r).tp == 0 for x in a["losses"][0])
    errors["loss"] = abs(first / tokens - scalars["losses"][0]) / scalars["losses"][0]
    errors["norm"] = max(abs(a["norms"][0] - scalars["norms"][0]) for a in answers) / scalars["norms"][0]
    return {"job": job, "errors": errors, "answers": answers}
