import sys
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
import torch

from phalanx.parallel.device import Device
from tests.parity import References
from tests.pool import Pool
from tests.signals import give_children_defaults

give_children_defaults()  # to those of every test, however it starts them
Device.pick("cpu", 0, 1)  # before any kernel: oneDNN asks only once what the CPU may be used for

# A busy machine is not a bug, and one commit gives one answer: `make test-slow` looks at examples of its own.
hypothesis.settings.register_profile("phalanx", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("phalanx")


# Markers of tests that run in a target of their own.
ASKED_FOR = {"hosts", "browser", "slurm", "ray", "postgres", "trackers"}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """A target that cannot run must not look as if it had passed: what lacks there is said as a failure."""
    report = yield
    if report.skipped and ASKED_FOR & {mark.name for mark in item.iter_markers()}:
        report.outcome, report.longrepr = "failed", f"it cannot run here: {report.longrepr[2]}"
    return report


def pytest_collection_finish(session):
    """In the main thread: what short commands are forked from ends with the thread that started it."""
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
    """What came of the module's SCENARIOS, by name: functions of a directory. Those that the selected
    tests ask for run once each, two at a time, since most of their time they only start."""
    module = request.module
    items = [i for i in request.session.items if i.module is module and hasattr(i, "callspec")]
    names = dict.fromkeys(i.callspec.params["name"] for i in items if "name" in i.callspec.params)
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(module.SCENARIOS[name], tmp_path_factory.mktemp("run")) for name in names}
        yield lambda name: started[name].result()


torch.set_num_threads(1)  # the pool's workers need the cores
