"""`phalanx firewall`: print rules that keep other hosts away from the hosts of a run."""

from __future__ import annotations

from typing import Annotated

import typer


def firewall(
    members: Annotated[
        list[str], typer.Argument(metavar="ADDRESS", help="Addresses or networks of all hosts of the run.")
    ],
    interface: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The interface that the rules are for; repeatable. Without it, all."),
    ] = None,
    keep: Annotated[
        list[int] | None, typer.Option(metavar="PORT", help="A port that stays open to all; repeatable.")
    ] = None,
) -> None:
    """Print rules for nftables that let only these hosts in. Load them on each host: phalanx firewall ... | nft -f -"""
    from phalanx.runtime.firewall import SSH, rules

    print(rules(members, interface or (), [SSH] if keep is None else keep), end="")
