"""A second, slow and obvious implementation of a fleet and its job: every node is looked at in every tick, and all that
happens is written out. It knows failures of one kind, a stop of fixed length for the whole job or for a replica, and
checkpoints. It shares nothing with the twin but the numbers that it is given."""

from random import Random


def restart(nodes, failures_per_node_s, stop_s, interval_s, stall_s, days, seed, tick_s=10.0):
    """Share of the time that trains, where each failure stops all, and work since the last checkpoint is lost."""
    rng, now, good, since, down_until = Random(seed), 0.0, 0.0, 0.0, 0.0
    stalled = 0.0
    while now < days * 86_400:
        failed = sum(rng.random() < failures_per_node_s * tick_s for _ in range(nodes))
        if failed:
            since, stalled, down_until = 0.0, 0.0, now + stop_s
        elif now >= down_until:
            if stalled > 0:
                stalled -= tick_s
            else:
                since += tick_s
                if since >= interval_s:
                    good, since, stalled = good + since, 0.0, stall_s
        now += tick_s
    return (good + since) / now


def contained(nodes, replica_nodes, failures_per_node_s, stall_s, heal_s, days, seed, tick_s=10.0):
    """Share of the work done, where a failure stops all for a moment, and its replica until it is healed."""
    rng, now, done, stopped_until = Random(seed), 0.0, 0.0, 0.0
    replicas = nodes // replica_nodes
    back = [0.0] * replicas
    while now < days * 86_400:
        for node in range(nodes):
            if rng.random() < failures_per_node_s * tick_s:
                back[node // replica_nodes] = now + heal_s
                stopped_until = now + stall_s
        if now >= stopped_until:
            done += tick_s * sum(at <= now for at in back) / replicas
        now += tick_s
    return done / now
