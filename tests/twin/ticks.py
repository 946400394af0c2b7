"""A second, slow and obvious implementation of a fleet and its job, which simulates every node in every tick and spells
everything out. It knows one kind of failure, a stop of fixed length for the whole job or for a replica, and
checkpoints. It shares only its input numbers with the twin."""

from random import Random


def restart(nodes, failures_per_node_s, stop_s, interval_s, stall_s, days, seed, tick_s=10.0):
    """Return the share of time spent training, where each failure stops the job and loses the work since the last
    checkpoint."""
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
    """Return the share of work done, where a failure stops all briefly, and its replica until it is healed."""
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
