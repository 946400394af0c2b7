"""The pages that the code writes are the pages that are committed."""

from pathlib import Path

import pytest

from phalanx.core.compat import RULES
from phalanx.spec.describe import fields
from phalanx.spec.docs import PAGES, compatibility_page, job_file_page, refused_pairs

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_committed_page_is_current(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `python -m phalanx.spec.docs`"


def test_pages_leave_nothing_out():
    assert all(f"`{field}`" in job_file_page() for field in fields())
    assert all(rule.why in compatibility_page() for rule in RULES)


def test_every_rule_about_compositions_is_in_the_matrix():
    assert set(refused_pairs().values()) == {rule.name for rule in RULES if rule.composition}
