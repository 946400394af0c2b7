"""Durability: the step that each tier of storage keeps safe, and what is lost as more of the machines fail."""

from __future__ import annotations

from phalanx.observe.story import Row, Story

#: tier -> the loss that it survives. From the fastest to the safest.
TIERS = {
    "live": "a rank or a replica: another replica holds the same state",
    "memory": "all processes of a host, while the host lives",
    "buddy": "a host: a copy is in the memory of another one",
    "disk": "all hosts, while the disk or file system lives",
    "store": "all hosts and their disks",
}


def place(story: Story) -> str:
    """Return the tier to which this run writes its checkpoints."""
    checkpoint = story.part.settings.get("checkpoint")
    url = str(checkpoint.get("dir", "")) if isinstance(checkpoint, dict) else ""
    return "store" if "://" in url and not url.startswith("file://") else "disk"


def tiers(story: Story) -> list[Row]:
    """Return, for each tier, the newest step that it holds, since when, and the steps to redo from there."""
    last: Row = story.rows[-1] if story.rows else {}
    done, out = story.done, list[Row]()

    def add(tier: str, step: int, since: float) -> None:
        behind = max(0, done - step)
        redo_s = sum(float(row.get("time_s") or 0.0) for row in story.rows[-behind:]) if behind else 0.0
        about = {"tier": tier, "survives": TIERS[tier], "step": step, "since": since}
        out.append({**about, "behind": behind, "redo_s": redo_s})

    forms = story.part.incidents.forms
    if done and forms and len(forms[-1].get("replicas") or ()) > 1 and story.part.state == "running":
        add("live", done, float(last.get("time") or 0.0))
    held = last.get("held")
    if story.part.state == "running" and isinstance(held, dict):  # state in memory ends with its processes
        for tier in ("memory", "buddy"):
            if isinstance(held.get(tier), int):
                add(tier, held[tier], _since(story, tier, held[tier]))
    saved = [event for part in story.parts for event in part.events if event.get("type") == "checkpoint"]
    if saved:
        add(place(story), int(saved[-1].get("step", 0)), float(saved[-1].get("time") or 0.0))
    return out


def headline(found: list[Row], done: int) -> str:
    """Answer: what is lost if everything is?"""
    if not found or found[-1]["tier"] not in ("disk", "store"):
        return "Nothing is durable yet: if all hosts are lost, the run begins again."
    worst = found[-1]
    if not worst["behind"]:
        return f"Every step is durable: step {worst['step']:,} is on {worst['tier']}."
    return (
        f"If all hosts are lost now, {worst['behind']:,} of {done:,} steps are done again "
        f"({worst['redo_s']:.3g} s of training); step {worst['step']:,} is on {worst['tier']}."
    )


def _since(story: Story, tier: str, step: int) -> float:
    """Return when the tier was first reported to hold the step."""
    at = 0.0
    for row in reversed(story.rows):
        held = row.get("held")
        if not isinstance(held, dict) or held.get(tier) != step:
            break
        at = float(row["time"])
    return at
