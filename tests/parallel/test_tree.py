"""The tree's arithmetic: whoever adds which run of leaves, the bits are the same."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.tree import TreeSum, fold, span


def leaves_of(node):
    level, index = node
    return list(range(index << level, (index + 1) << level))


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_span_covers_its_leaves_once_in_order_with_few_nodes(start, length):
    nodes = span(start, start + length)
    assert [leaf for node in nodes for leaf in leaves_of(node)] == list(range(start, start + length))
    assert len(nodes) <= 2 * max(1, length.bit_length())


@given(st.integers(1, 64), st.data())
def test_any_cut_into_runs_gives_the_same_bits(count, data):
    values = torch.randn(count, 8, generator=torch.Generator().manual_seed(count)) * 10.0 ** torch.arange(-4, 4)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=5))) if count > 1 else []
    bounds = [0, *cuts, count]
    merged = TreeSum()
    for start, stop in itertools.pairwise(bounds):
        mine = TreeSum()
        for leaf in range(start, stop):
            mine.push((0, leaf), values[leaf].clone())
        parts = mine.take()
        assert [node for node, _ in parts] == span(start, stop)
        for node, part in parts:
            merged.push(node, part)
    alone = TreeSum()
    for leaf in range(count):
        alone.push((0, leaf), values[leaf].clone())
    assert torch.equal(fold(merged.take()), fold(alone.take()))


def test_left_to_right_gives_other_bits_so_the_test_above_can_fail():
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    tree = TreeSum()
    running = torch.zeros(512)
    for leaf in range(64):
        tree.push((0, leaf), values[leaf].clone())
        running += values[leaf]
    assert not torch.equal(fold(tree.take()), running)
