from __future__ import annotations

import pytest

from phalanx.checkpoint import second


@pytest.fixture(autouse=True)
def second_reader_here(request):
    """Have the second reader read in this process, unless a test asks for the real one, which is a process."""
    with pytest.MonkeyPatch.context() as patched:
        if "real_second_reader" not in request.keywords:
            patched.setattr(second, "look", lambda store, name, reason="": second.read_again(store, name))
        yield
