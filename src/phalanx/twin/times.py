"""Compute how long things take in a scenario, from the assumptions and the planner's cost model."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.control.pace import hang_limit_ns
from phalanx.control.policy import MISSED_BEATS, beat_ns
from phalanx.plan.cost.evaluate import setup_s
from phalanx.twin.agenda import S
from phalanx.twin.scenario import Scenario

LIGHT_KM_PER_S = 200_000.0  # in glass
GRADIENT_BYTES = 2  # per parameter in transit, for gradients and for weights


@dataclass(frozen=True, slots=True)
class Times:
    """Durations in ns. Those in `stop` are means; the actual ones are drawn."""

    detect: dict[str, int]  # by effect
    decide: int  # a message to all and back
    launch: int
    build: int  # build the world of a replica and its engine
    form: int  # form the groups between replicas
    live: int  # load the state of a rank from a peer
    memory: int  # load it from the memory of a node
    durable: int  # load all state from storage
    drain: int  # write all state to storage
    stop: int  # a whole recovery that stops the job; 0: it follows from the others
    stall: int  # per checkpoint
    memory_share: float  # share of training time that snapshots in memory cost


def round_trip_s(scenario: Scenario) -> float:
    return 2 * (scenario.sites > 1) * scenario.distance_km / LIGHT_KM_PER_S


def across_s(scenario: Scenario) -> float:
    """Return the time to send the gradients or the weights of a replica between sites."""
    if scenario.sites == 1:
        return 0.0
    return GRADIENT_BYTES * scenario.params / (scenario.assumed("sites.gb_per_s") * 1e9)


def whole_step_s(scenario: Scenario) -> float:
    """Return the length of a step at full strength, including the exchange between sites that ends it: replicas are
    synchronous under every policy."""
    return scenario.step_s + round_trip_s(scenario) + across_s(scenario)


def times_of(scenario: Scenario) -> Times:
    from phalanx.hardware.catalogue import load

    assume, policy = scenario.assumed, scenario.policy
    contained = policy in ("contained", "shrink")
    node = load().node(scenario.hardware)
    nodes, replicas = scenario.gpus // node.chips, scenario.gpus // scenario.replica_gpus
    state_bytes = scenario.params * assume("checkpoint.bytes_per_param")
    rank_bytes = state_bytes / (scenario.replica_gpus if contained else scenario.gpus)
    live_s = rank_bytes / (node.nic_bytes_per_s * assume("contained.restore_share"))
    storage_s = state_bytes / (assume("checkpoint.storage_gb_per_s") * 1e9)
    exit_s = assume("contained.exit_s") if contained else assume(f"{policy}.detect_s")
    silent_s = MISSED_BEATS * beat_ns(nodes) / S if contained else exit_s
    hang_s = hang_limit_ns(int(whole_step_s(scenario) * S), beat_ns(nodes)) / S if contained else exit_s
    detect = {"worker": exit_s, "hang": hang_s, "node": silent_s, "link": exit_s, "slow": exit_s, "corrupt": exit_s}
    if scenario.detect_s >= 0:
        detect = dict.fromkeys(detect, scenario.detect_s)
    stop_s = scenario.stop_s
    if not stop_s and policy == "restart":
        stop_s = assume("restart.stop_s") + float(setup_s(scenario.gpus))
    elif not stop_s and policy == "hot":
        stop_s = assume("hot.stop_s")
    far_s = round_trip_s(scenario)  # added to every message to all and back
    stall_s = assume("checkpoint.own_stall_s" if contained else "checkpoint.stall_s")
    return Times(
        detect={effect: int(s * S) for effect, s in detect.items()},
        decide=int((assume("contained.decide_s") + far_s) * S),
        launch=int(assume("contained.launch_s") * S),
        build=int((assume("contained.engine_s") + float(setup_s(scenario.replica_gpus))) * S),
        form=int((assume("contained.form_base_s") + float(setup_s(replicas) - setup_s(0)) + far_s) * S),
        live=int(live_s * S),
        memory=int(2 * live_s * S),
        durable=int(storage_s * S),
        drain=int(storage_s * S),
        stop=int(stop_s * S),
        stall=int((scenario.stall_s if scenario.stall_s >= 0 else stall_s) * S),
        memory_share=0.0 if policy == "restart" else assume("checkpoint.memory_share"),
    )
