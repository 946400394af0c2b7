"""Where the kernels run: on the device of PHALANX_TEST_DEVICE, or, with TRITON_INTERPRET=1 and Triton installed, in
Triton's interpreter on the CPU. With neither, only the formulas are tested."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("PHALANX_TEST_DEVICE", "cpu"))


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def triton_kernels():
    """Skip where Triton cannot run."""
    if DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs an accelerator, or TRITON_INTERPRET=1")
    return pytest.importorskip("triton")


@pytest.fixture
def accelerator(triton_kernels):
    """Skip without an accelerator: Triton 3.6's interpreter rounds fp8 wrongly (127.7 becomes 64)."""
    if DEVICE.type == "cpu":
        pytest.skip("needs an accelerator")
