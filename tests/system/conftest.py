from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest


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
