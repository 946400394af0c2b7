import pytest

from tests.parity import References
from tests.pool import Pool


@pytest.fixture(scope="session")
def pool():
    with Pool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def references(pool):
    return References(pool)
