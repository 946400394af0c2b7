"""Rules for nftables that keep strangers off the ports of a run's hosts. Peers of Gloo and NCCL prove nothing to each
other, so keeping strangers out is the network's task (docs/security.md)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from phalanx.core.errors import UserError

SSH = 22


def rules(members: Iterable[str], interfaces: Iterable[str] = (), keep: Iterable[int] = (SSH,)) -> str:
    """Return the rules for `nft -f -` on each host of the run. `members`: addresses or networks of all hosts, including
    the controller's. `interfaces`: where the rules apply; none: everywhere. `keep`: ports that stay open to
    everybody."""
    found: dict[int, list[str]] = {4: [], 6: []}
    for text in members:
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            remedy = "name addresses or networks, such as 10.0.0.2 or 10.0.0.0/24"
            raise UserError(str(error), field="member", value=text, remedy=remedy) from None
        found[network.version].append(str(network))
    if not any(found.values()):
        raise UserError("nobody could speak to this host", field="members", value=[], remedy="name the run's hosts")
    named = ", ".join(f'"{name}"' for name in interfaces)
    where = f"iifname {{ {named} }} " if named else ""
    lines = ["table inet phalanx", "delete table inet phalanx", "table inet phalanx {", "  chain input {"]
    lines += ["    type filter hook input priority filter; policy accept;", '    iif "lo" accept']
    lines += ["    ct state established,related accept"]
    for version, family in ((4, "ip"), (6, "ip6")):
        if found[version]:
            lines.append(f"    {where}{family} saddr {{ {', '.join(found[version])} }} accept")
    if keep := [*keep]:
        lines.append(f"    {where}tcp dport {{ {', '.join(map(str, keep))} }} accept")
    lines += [f"    {where}meta l4proto {{ tcp, udp }} drop", "  }", "}"]
    return "\n".join(lines) + "\n"
