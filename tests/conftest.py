import sys
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
import torch

from phalanx.parallel.device import Device
from tests.parity import References
from tests.pool import Pool
from tests.signals import give_children_defaults

give_children_defaults()  # for the children of every test, however it starts them
Device.pick("cpu", 0, 1)  # before any kernel: oneDNN checks only once which CPU features it may use

# A busy machine is not a bug, and a commit must always give the same result: `make test-slow` tries other examples.
hypothesis.settings.register_profile("phalanx", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("phalanx")


# Markers of tests that run in a target of their own.
ASKED_FOR = {"hosts", "browser", "slurm", "ray", "postgres", "trackers"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Turn a skip into a failure for targets that cannot run here, so that they do not look as if they had passed."""
    report = yield
    if report.skipped and ASKED_FOR & {mark.name for mark in item.iter_markers()}:
        report.outcome, report.longrepr = "failed", f"it cannot run here: {report.longrepr[2]}"
    return report


def pytest_collection_finish(session):
    """Start the fork servers in the main thread, because they end with the thread that started them."""
    for name in ("tests.forked", "tests.warm"):
        if name in sys.modules and not session.config.option.collectonly:
            sys.modules[name].start()


@pytest.fixture(scope="session")
def pool():
    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def references(pool):
    return References(pool)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    """Yield the outcomes of the module's SCENARIOS by name; each is a function of a directory. Those that the selected
    tests need run once each, two at a time, since they spend most of their time starting."""
    module = request.module
    items = [i for i in request.session.items if i.module is module and hasattr(i, "callspec")]
    names = dict.fromkeys(i.callspec.params["name"] for i in items if "name" in i.callspec.params)
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(module.SCENARIOS[name], tmp_path_factory.mktemp("run")) for name in names}
        yield lambda name: started[name].result()


torch.set_num_threads(1)  # the pool's workers need the cores
