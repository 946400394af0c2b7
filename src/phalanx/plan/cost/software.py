"""Software: facts about what a training engine does that costs time or memory (software.toml). This engine is one of
them; the others are listed to learn from their published runs, and to plan for them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from phalanx.plan.cost.sizes import Num

OWN = "phalanx"


@dataclass(frozen=True, slots=True)
class Software:
    """Each field is one fact, or a column of them. Bytes are per element."""

    attention: Num = (
        "new"  # kernel: new (FlashAttention-3, cuDNN), flash2, triton, scores (the matrix of scores in memory)
    )
    fused: Num = True  # elementwise work in few kernels (compiled or hand-written), else eager
    sequence_parallel: Num = True  # norms and residuals split over tp
    overlaps_tp: Num = False  # tensor-parallel communication behind products
    overlaps_ep: Num = False  # exchange of experts behind the other micro-batch (DualPipe and kin)
    dispatcher: Num = (
        "alltoall"  # of tokens to experts: alltoall (NCCL) or flex (DeepEP, HybridEP: a domain gets a token once)
    )
    fused_experts: Num = False  # quantisation and activation inside the experts' products
    graphs: Num = "none"  # CUDA graphs: none, partial (attention and router), full (no host time)
    hierarchical: Num = True  # gathers go between nodes first, in a tree; else one ring through all ranks
    one_card: Num = False  # a gather uses one network card of a node at a time (a broadcast per parameter)
    copies: Num = False  # sharded weights are copied out of and gradients into the communication buffers
    accumulates: Num = True  # weights' gradients are added up in fp32 by the product itself
    scatter_bytes: Num = 4.0  # of a gradient on the wire
    ring_grad_bytes: Num = 2.0  # of gradients of keys and values that go round the cp ring
    merge_bytes: Num = 12.0  # read and written by a hop of the ring per element of its result, to merge it in fp32
    reruns_ring: Num = False  # selective recomputation sends keys and values round again
    pipeline_keeps: Num = True  # with a pipeline, zero 2 and 3 keep weights and gradients whole between micro-batches
    keeps_own: Num = False  # a replica keeps its own gradients beside the sum over all replicas until the commit
    grad_bytes: Num = 4.0  # of a gradient in memory
    eight_bytes: Num = 2.0  # of a weight whose products are quantised
    moment_bytes: Num = 8.0  # of AdamW's two moments on the device
    remainders: Num = False  # weights in 16 bits with a 16-bit remainder, instead of an fp32 master
    one_pass_bytes: Num = 0.0  # of a gradient when a rank alone has one micro-batch; it takes the room of activations
    adds_apart: Num = False  # micro-batches' gradients are added up in fp32 by passes over memory
    keeps_gated: Num = True  # the result of an FFN's activation function stays in memory for the backward
    keeps_both: Num = False  # quantised: attention's output in 16 bits too, beside the next product's input
    kept_sums: Num = 0.5  # share of residuals and norms that selective recomputation keeps
    router_copy: Num = False  # the router's fp32 input, scores and choices stay too
    runs_ahead: Num = False  # the host waits for the device once a step, so the head may hide a layer's delay
    fused_loss: Num = False  # logits are made in chunks (core.shape.loss_rows), and the head's gradients in the forward
    logit_bytes: Num = 14.0  # per logit: bf16 and fp32 copies, softmax, gradients; a fused loss needs fewer
    kept_products: Num = 1.0  # share of the products' results that selective recomputation keeps
    reserve: Num = 1.05  # bytes reserved over bytes allocated
    trained: Num = 1.0  # share of the weights that get gradients (LoRA: few)
    offload: Num = False  # optimizer and kept activations in host memory

    @classmethod
    def stack(cls, several: list[Software]) -> Software:
        """Combine several into one whose fields are columns, a row for each."""
        return cls(**{f.name: np.array([getattr(s, f.name) for s in several]) for f in fields(cls)})

    def take(self, rows: Num) -> Software:
        return Software(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("phalanx.plan.cost").joinpath("software.toml").read_text())


def names() -> list[str]:
    return list(_table())


def facts(name: str) -> dict[str, Any]:
    """Return what is known about an engine beyond the defaults of `Software`."""
    known = {f.name for f in fields(Software)}
    return {key: value for key, value in _table()[name].items() if key in known}


def costs(name: str, fused: bool) -> dict[str, Any]:
    """Return Profile fields measured on this software itself, which replace estimates from the runs of others."""
    measured = _table()[name].get("costs", {})
    return {**measured.get("compiled", {}), **({} if fused else measured.get("eager", {}))}


def software(name: str = OWN, **more: Any) -> Software:
    """Look up software by name; `more` are facts of one run or recipe."""
    return Software(**(facts(name) | more))


def source(name: str) -> str:
    return str(_table()[name]["source"])
