"""Fractional GPUs: nothing is promised twice, nothing that fits is refused, and what is left is useful for others."""

import random

from phalanx.control.schedule.fractions import WHOLE, Host, Need, Shares, expected


def fits(host: Host, need: Need) -> bool:
    if need.cpus > host.cpus or need.memory > host.memory or (need.models and host.model not in need.models):
        return False
    if need.parts >= WHOLE:
        return host.left.count(WHOLE) >= need.gpus
    return not need.gpus or max(host.left, default=0) >= need.parts


def test_never_more_than_there_is_and_no_refusal_while_there_is_room():
    for seed in range(5):
        draw = random.Random(seed)
        hosts = [
            Host(draw.choice((16, 96)), 400, draw.choice("ab"), [WHOLE] * draw.choice((0, 1, 4))) for _ in range(8)
        ]
        kinds = [Need(4, 8, 1, 460), Need(12, 8, 1, WHOLE), Need(2, 8, 1, 250, frozenset("a")), Need(20, 50, 4, WHOLE)]
        needs = [*draw.choices(kinds, k=80), Need(30, 8, 0, 0)]
        shares, total = Shares(hosts, expected(needs)), sum(sum(host.left) for host in hosts)
        placed = 0
        for need in needs:
            able = [fits(host, need) for host in hosts]
            found = shares.place(need)
            assert bool(found) == any(able)
            if found:
                assert able[found[0]]
                placed += need.total
            assert all(host.cpus >= 0 and host.memory >= 0 and min(host.left, default=0) >= 0 for host in hosts)
        assert placed == total - sum(sum(host.left) for host in hosts)


def test_a_share_goes_where_two_of_them_fill_a_gpu():
    """It is better to use 460 of the 540 parts left than 460 of a GPU that another kind of job needs whole."""
    hosts = [Host(96, 400, "", [WHOLE, WHOLE]), Host(96, 400, "", [540, WHOLE])]
    shares = Shares(hosts, expected([Need(4, 8, 1, 460)] * 3 + [Need(4, 8, 1, WHOLE)] * 3))
    assert shares.place(Need(4, 8, 1, 460)) == (1, [0])


def test_a_job_with_many_cpus_leaves_the_others_their_gpus():
    """On the first host two GPUs would be left with CPUs for one and a half; the second has plenty."""
    hosts = [Host(36, 400, "", [WHOLE] * 3), Host(96, 400, "", [WHOLE] * 3)]
    shares = Shares(hosts, expected([Need(12, 8, 1, WHOLE)] * 9))
    found = shares.place(Need(20, 8, 1, WHOLE))
    assert found and found[0] == 1
