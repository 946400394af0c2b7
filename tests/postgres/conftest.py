from __future__ import annotations

import itertools

import pytest

from tests.postgres.server import PASSWORD, Postgres, programs

_numbers = itertools.count()


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/postgres" in str(item.path):
            item.add_marker(pytest.mark.postgres)


@pytest.fixture(scope="session")
def server():
    if programs() is None:
        pytest.skip("PostgreSQL is not installed: apt install postgresql")
    server = Postgres()
    yield server
    server.close()


@pytest.fixture
def database(server, monkeypatch):
    """Create an empty database, and return its name."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    name = f"test_{next(_numbers)}"
    server.create(name)
    return name
