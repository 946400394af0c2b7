"""Validate the same objects against the whole schemas of the package kubernetes-validate, with its own strict
validator. Run by `make test-kubernetes`, which installs it."""

from __future__ import annotations

import pytest

from tests.engines.kubernetes_stub import CUSTOM, VERSIONS
from tests.engines.test_kubernetes import ASKED, arguments, job, manifests  # noqa: F401

whole = pytest.importorskip("kubernetes_validate", reason="make test-kubernetes installs it")


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_would_take_every_object(job, arguments, asked, version):  # noqa: F811
    made = [each for each in manifests(job, arguments, **ASKED[asked]) if each["kind"] not in CUSTOM]
    assert [whole.validate(each, version, strict=True) for each in made] == [version] * len(made)


def test_it_is_strict(job, arguments):  # noqa: F811
    made = manifests(job, arguments)[-1]
    made["spec"]["paralelism"] = 3
    with pytest.raises(whole.ValidationError, match="paralelism"):
        whole.validate(made, VERSIONS[-1], strict=True)
