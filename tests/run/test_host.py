"""What this host cannot do is refused with figures that are right."""

from __future__ import annotations

import dataclasses
import time

import pytest

from phalanx.core.errors import UserError
from phalanx.core.job import DataConfig, Job, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.run import host as limits

# 10 M parameters a layer and little else: 0.149 GiB with gradients and moments in fp32.
WIDE = ModelConfig(dim=1000, ffn_dim=2000, num_heads=10, num_kv_heads=10, num_layers=10)


def job(replica: int = 1, precision: str = "fp32", device: str = "cpu", **model) -> Job:
    return Job(
        model=dataclasses.replace(WIDE, **model),
        layout=Layout(replica=replica),
        train=TrainConfig(precision=precision),
        run=RunConfig(device=device),
    )


@pytest.fixture
def host(monkeypatch):
    def has(gib: float, accelerator: bool = False) -> None:
        monkeypatch.setattr(limits, "limit_bytes", lambda: int(gib * limits.GIB))
        monkeypatch.setattr(limits, "ACCELERATORS", ("/dev/null",) if accelerator else ())

    return has


def test_what_fits_is_let_through(host):
    need = job().model.num_params * 16 / limits.GIB
    host(need * 1.001)
    limits.refuse(job())
    host(need * 0.999)
    with pytest.raises(UserError, match=f"need {need:.1f} GiB"):
        limits.refuse(job())


@pytest.mark.parametrize("more", [{"replica": 2}, {"precision": "fp64"}])
def test_replicas_and_precision_count(host, more):
    host(job().model.num_params * 31 / limits.GIB)
    limits.refuse(job())
    with pytest.raises(UserError, match="this host has"):
        limits.refuse(job(**more))


def test_experts_count(host):
    experts = job(family="moe", num_experts=8)
    host(experts.model.num_params * 16 / limits.GIB * 0.999)
    limits.refuse(job())
    with pytest.raises(UserError, match="this host has"):
        limits.refuse(experts)


def test_as_many_classes_as_can_be_drawn(host):
    def images(classes: int) -> Job:
        return dataclasses.replace(job(family="image", vocab_size=classes), data=DataConfig(source="synthetic-images"))

    host(1.0)
    limits.refuse(images(8))
    with pytest.raises(UserError, match=r"model\.vocab_size = 9: synthetic-images have at most 8 classes"):
        limits.refuse(images(9))


def test_host_memory_does_not_bound_accelerators_or_unknown_models(host):
    host(0.001, accelerator=True)
    limits.refuse(job(device="auto"))
    limits.refuse(job(device="cuda"))
    limits.refuse(job(family="mine.py:FAMILY"))
    with pytest.raises(UserError):
        limits.refuse(job(device="cpu"))


def test_a_clock_that_is_off_is_told():
    about = {"node": "a", "devices": [], "memlock_bytes": -1, "clock_s": time.time()}
    assert not [*limits.warnings(about)]
    (said,) = limits.warnings(about | {"clock_s": time.time() - 3600})
    assert "the clock of node a is 3,600 s behind this host's" in said and "chrony" in said
    (said,) = limits.warnings(about | {"clock_s": time.time() + 3600})
    assert "ahead of" in said
