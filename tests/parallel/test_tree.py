"""The tree's arithmetic: however the leaves are dealt out, the bits are the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.tree import TreeSum, cover, fold, join, merge


def leaves_of(node):
    level, index = node
    return list(range(index << level, (index + 1) << level))


def some_values(count):
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count)) * 10.0 ** torch.arange(-4, 4)


def sums(values, leaves):
    tree = TreeSum()
    for leaf in sorted(leaves):
        tree.push((0, leaf), values[leaf].clone())
    return tree.take()


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_run_of_leaves_is_covered_once_in_order_by_few_nodes(start, length):
    nodes = cover(range(start, start + length))
    assert [leaf for node in nodes for leaf in leaves_of(node)] == list(range(start, start + length))
    assert len(nodes) <= 2 * max(1, length.bit_length())


@given(st.sets(st.integers(0, 300)))
def test_any_set_of_leaves_is_covered_by_its_largest_nodes(leaves):
    nodes = cover(leaves)
    assert [leaf for node in nodes for leaf in leaves_of(node)] == sorted(leaves)
    parents = [leaves_of((level + 1, index // 2)) for level, index in nodes]
    assert not any(set(parent) <= leaves for parent in parents)


@given(st.integers(1, 64), st.data())
def test_any_deal_gives_the_same_bits(count, data):
    """Each of several ranks adds what it holds, in two passes; then the ranks' sums are added."""
    values = some_values(count)
    owner = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    late = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    parts = []
    for rank in range(5):
        passes = [[i for i in range(count) if (owner[i], late[i]) == (rank, again)] for again in (False, True)]
        mine = merge([part for leaves in passes for part in sums(values, leaves)]).take()
        nodes = [cover(leaves) for leaves in passes]
        assert [node for node, _ in mine] == cover(passes[0] + passes[1]) == join(nodes[1] + nodes[0])
        parts += mine
    assert torch.equal(fold(merge(parts).take()), fold(sums(values, range(count))))


@given(st.integers(1, 16))
def test_folding_leaves_the_parts_as_they_are(count):
    values = some_values(count)
    parts = sums(values, range(count))
    before = [value.clone() for _, value in parts]
    fold(parts)
    assert all(torch.equal(value, old) for (_, value), old in zip(parts, before, strict=True))


def test_other_orders_give_other_bits_so_the_tests_above_can_fail():
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    tree = fold(sums(values, range(64)))
    assert not torch.equal(tree, values.cumsum(0)[-1])
    by_rank = [*sums(values, range(1, 64, 2)), *sums(values, range(0, 64, 2))]
    unsorted = TreeSum()
    for node, value in by_rank:
        unsorted.push(node, value)
    assert not torch.equal(tree, fold(unsorted.take()))
