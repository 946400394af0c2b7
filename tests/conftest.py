import hypothesis
import pytest
import torch

from phalanx.parallel.device import Device
from tests.parity import References
from tests.pool import Pool

Device.pick("cpu", 0, 1)  # before any kernel: oneDNN asks only once what the CPU may be used for

hypothesis.settings.register_profile("phalanx", deadline=None)  # a busy machine is not a bug
hypothesis.settings.load_profile("phalanx")


@pytest.fixture(scope="session")
def pool():
    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def references(pool):
    return References(pool)


torch.set_num_threads(1)  # the pool's workers need the cores
