"""Start times and pauses that follow the carbon intensity of electricity within a deadline."""

import itertools

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import HOUR, S
from phalanx.control.schedule.curves import choose, cost
from phalanx.control.schedule.gangs import RUNNING, WAITING
from tests.control.schedule.test_complaints import Bench

# Grams of CO2 per kWh, Germany, 2020-06-01 to 06-03 by the hour (ENTSO-E data in dos-group/lets-wait-awhile @5e0d155,
# data/ger_ci.csv; Wiesner et al., Middleware 2021).
GERMANY = [
    173,
    179,
    189,
    198,
    195,
    193,
    177,
    158,
    144,
    132,
    130,
    133,
    138,
    138,
    142,
    156,
    183,
    219,
    245,
    248,
    238,
    219,
    222,
    232,
    238,
    243,
    255,
    274,
    299,
    291,
    269,
    240,
    218,
    204,
    199,
    195,
    204,
    209,
    233,
    266,
    294,
    326,
    350,
    357,
    349,
    334,
    319,
    316,
    307,
    298,
    295,
    310,
    322,
    310,
    285,
    266,
    248,
    235,
    227,
    229,
    232,
    232,
    234,
    233,
    263,
    280,
    287,
    295,
    297,
    297,
    282,
    268,
]


def saved(pausable: bool) -> float:
    """Return the share of carbon saved against an immediate start, for jobs of 8 h with a day of slack, one starting
    every hour."""
    least = most = 0
    for hour in range(24):
        slots = choose(GERMANY, hour * HOUR, 8 * HOUR, (hour + 32) * HOUR, pausable, 120 * S)
        least += cost(GERMANY, slots)
        most += cost(GERMANY, [(hour * HOUR, (hour + 8) * HOUR)])
    return 1 - least / most


def test_waiting_for_a_better_hour_saves_carbon():
    in_one, in_pieces = saved(pausable=False), saved(pausable=True)
    print(f"saved: {in_one:.1%} in one piece, {in_pieces:.1%} with pauses")
    assert 0.05 < in_one < in_pieces < 0.6


def test_one_piece_is_as_good_as_trying_every_minute():
    for begin, need in itertools.product((0, 5, 13), (1, 3, 10)):
        now, needs, deadline = begin * HOUR + 17 * 60 * S, need * HOUR + 600 * S, (begin + 40) * HOUR
        (slot,) = choose(GERMANY, now, needs, deadline, False, 0)
        assert now <= slot[0] and slot[1] <= deadline and slot[1] - slot[0] == needs
        tries = range(now, deadline - needs + 1, 60 * S)
        assert cost(GERMANY, [slot]) <= min(cost(GERMANY, [(b, b + needs)]) for b in tries)


def test_pieces_give_the_whole_time_and_keep_the_deadline():
    for begin, need, pause in itertools.product((0, 7), (2, 9), (0, 300 * S)):
        slots = choose(GERMANY, begin * HOUR, need * HOUR, (begin + 30) * HOUR, True, pause)
        ran = sum(end - start for start, end in slots) - pause * (len(slots) - 1)
        assert ran >= need * HOUR and slots[-1][1] <= (begin + 30) * HOUR and slots[0][0] >= begin * HOUR
        assert all(a[1] < b[0] for a, b in itertools.pairwise(slots))


def test_no_time_to_lose_means_at_once():
    assert choose(GERMANY, 10, 5 * HOUR, 5 * HOUR, True, 0) == [(10, 10 + 5 * HOUR)]
    assert choose([], 10, HOUR, 50 * HOUR, False, 0) == [(10, 10 + HOUR)]


def test_the_scheduler_waits_and_pauses():
    prices = [9, 1, 9, 9, 1, 9, 9, 9]
    bench = Bench(nodes=1, hour_prices=prices)
    bench.submit("g", gpus=8, deadline_ns=8 * HOUR, needs_ns=100 * 60 * S, pausable=True)
    assert bench.state("g") == WAITING
    states = []
    for _ in range(8 * 6):
        bench.wait(600)
        states.append(bench.state("g") == RUNNING)
    assert not any(states[:5]) and all(states[6:11]) and not any(states[12:23]) and states[24], states
    assert bench.count(asks.Stop) == 1
