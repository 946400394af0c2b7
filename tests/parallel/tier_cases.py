"""Cases of the tests of the tiers, run inside pool workers."""

import torch
import torch.distributed as dist

from phalanx.core.job import CollectivesConfig
from phalanx.parallel.algorithms import ALGORITHMS
from phalanx.parallel.cross import Cross
from phalanx.parallel.groups import _standalone
from phalanx.parallel.reduce import StepFailed
from phalanx.parallel.tiers import Peers, TieredAllGather, TieredReduceScatter
from tests.cases import connect
from tests.train.engine_cases import _meet


def _racks(nodes):
    """Three levels: the nodes, pairs of nodes, the pairs."""
    width, half = len(nodes[0]), len(nodes) // 2
    pairs = [[nodes[n][i], nodes[n + 1][i]] for n in range(0, len(nodes), 2) for i in range(width)]
    across = [[nodes[2 * h + m][i] for h in range(half)] for m in range(2) for i in range(width)]
    return [nodes, pairs, across]


def collectives(args):
    """Compare sums, scatters and gathers of one algorithm with plain ones over the whole group, on numbers whose sums
    are exact. The algorithm for `racks` is plugged in here."""
    rank = connect(args)
    shard = rank.groups.shard
    me, size, name = shard.rank(), shard.size(), args["algorithm"]
    ALGORITHMS["racks"] = _racks
    config = CollectivesConfig(replica=name, shard=name)

    def form(axis):
        return _standalone(dist.PrefixStore(f"{args['generation']}/{axis}", rank.store), rank.device)

    nodes = rank.job.layout.by_node(list(range(size)))
    tiers = {shard.group_name: Peers("shard", nodes, me, config, "gloo", form("shard"))}
    cross = Cross(Peers("replica", nodes, me, config, "gloo", form("replica")))
    torch.manual_seed(me)
    mine = torch.randint(-1000, 1000, (size * 6,)).double()
    want = mine.clone()
    dist.all_reduce(want, group=shard)

    part = torch.empty(6, dtype=mine.dtype)
    TieredReduceScatter(tiers)(part, mine, shard, dist.ReduceOp.SUM)
    whole = torch.zeros_like(mine)
    whole[6 * me : 6 * me + 6] = part
    TieredAllGather(tiers)(whole, whole[6 * me : 6 * me + 6], shard)  # in place, as FSDP2 does it
    odd = mine[: size * 6 - 5].clone()  # does not divide by the number of ranks
    cross.sum_(odd)
    tree = cross.tree_sum([((0, me), mine.clone())], [[(0, r)] for r in range(size)])
    out = {
        "scatter": torch.equal(part, want[6 * me : 6 * me + 6]),
        "gather": torch.equal(whole, want),
        "sum": torch.equal(odd, want[: odd.numel()]),
        "tree": torch.equal(tree, want),
        "sent": cross.sent_bytes > 0 and tiers[shard.group_name].sent_bytes > 0,
    }
    for peers in tiers.values():
        peers.close()
    cross.close()
    rank.close()
    return out


def ways(args):
    """Run one step; return the bytes that each algorithm sent along each axis."""
    rank = connect(args)
    rank.engine.step(rank.batches(0))
    cross = rank.groups.cross._peers._ways if rank.groups.cross else {}
    shard = {n: w for peers in rank.groups.tiers.values() for n, w in peers._ways.items()}
    out = {"replica": {n: w.sent_bytes for n, w in cross.items()}, "shard": {n: w.sent_bytes for n, w in shard.items()}}
    rank.close()
    return out


def lose_one(args):
    """Let replica 3 leave before the step. Only its neighbours wait for it, yet all must fail soon."""
    rank = connect(args)
    _meet(rank, args, "formed")
    failed = ""
    if rank.coord.replica < 3:
        try:
            rank.engine.step(rank.batches(0))
        except StepFailed as error:
            failed = str(error)
        _meet_three(rank, args)  # until then the engine and its groups are kept
    else:
        rank.groups.cross.close()
    rank.close()
    return {"failed": failed, "step": rank.state.step}


def _meet_three(rank, args):
    key = f"left{args['generation']}/"
    rank.store.set(f"{key}{args['rank']}", "")
    rank.store.wait([f"{key}{r}" for r in range(3)])
