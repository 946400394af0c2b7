"""The processes between the agents of a large fleet and its controller. They can be started by anything on any host.
`phalanx aggregator` serves some hundred agents; `phalanx relay` folds what some aggregators report for the record. They
end when nothing above them has answered for long: the run is over, or out of their reach."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.runtime import kernel
from phalanx.runtime.aggregator import Aggregator
from phalanx.runtime.inventory import address_towards, parse_address
from phalanx.runtime.reports import Relay
from phalanx.runtime.secret import Identity, load_secret
from phalanx.runtime.transport import Link, Loop

GIVE_UP_S = 600.0
LOOK_S = 1.0


def aggregator(argv: list[str] | None = None) -> int:
    parser = _parser("aggregator", "Serve some hundred agents, which join here, and tell the controller what changes.")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT[,...]", help="as `phalanx nodes ls` says")
    parser.add_argument("--relay", default="", metavar="HOST:PORT", help="to which reports go, if not to the record")
    parser.add_argument(
        "--run", type=Path, metavar="RUN", help="the run's folder, where the step times of single ranks are kept"
    )
    return _main(parser, argv)


def relay(argv: list[str] | None = None) -> int:
    parser = _parser("relay", "Fold what some aggregators say for the record of a run, and pass it on.")
    parser.add_argument("--record", required=True, metavar="HOST:PORT", help="as `phalanx nodes ls` says")
    return _main(parser, argv)


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"phalanx {name}", description=about)
    parser.add_argument("--secret", type=Path, required=True, metavar="FILE", help="the run's secret")
    parser.add_argument("--name", default=socket.gethostname(), help="the same through restarts (default: the host's)")
    parser.add_argument("--listen", default="", metavar="HOST[:PORT]", help="default: the address that reaches the run")
    parser.add_argument("--give-up-s", type=float, default=GIVE_UP_S, help="without the run (default: %(default)g)")
    return parser


def _main(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    args = parser.parse_args(argv)
    kernel.allow_files()
    try:
        loop = Loop()
        address, link = _serve(loop, args)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(address), flush=True)
    heard_at = time.monotonic()
    while time.monotonic() - heard_at < args.give_up_s:
        loop.turn(LOOK_S)
        if link.session:
            heard_at = time.monotonic()
    print(f"the run was not heard of for {args.give_up_s:g} s: {link.trouble}", file=sys.stderr)
    return 1


def _serve(loop: Loop, args: argparse.Namespace) -> tuple[tuple[str, int], Link]:
    """Listen, and connect to the level above. Return the address to join at, and the link."""
    secret, me = load_secret(args.secret, create=False), Identity("aggregator", args.name, time.time_ns())
    if "record" in args:
        above = [parse_address(args.record, "--record")]
    else:
        above = [parse_address(each, "--controller") for each in args.controller.split(",")]
    host, port = _listen_at(args.listen, above[0][0])
    if "record" in args:
        made = Relay(loop, secret, me, above[0], host, port)
        assert made.folder.upstream
        return made.server.address, made.folder.upstream
    up = parse_address(args.relay, "--relay") if args.relay else None
    near = None
    if args.run:
        from phalanx.observe.near import NearTables

        near = NearTables(args.run, args.name)
    served = Aggregator(loop, secret, me, above, host, port, seed=me.incarnation, recorder=up, near=near)
    return served.server.address, served.link


def _listen_at(text: str, above: str) -> tuple[str, int]:
    if ":" in text:
        return parse_address(text, "--listen")
    return text or address_towards(above), 0
