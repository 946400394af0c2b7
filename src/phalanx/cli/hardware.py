"""`phalanx hardware`: show the catalogue of chips, nodes, fabrics and sites, and the sources of its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

hardware_app = typer.Typer(no_args_is_help=True, help="The catalogue of hardware that plans are made for.")
Json = Annotated[bool, typer.Option("--json", help="For programs: SI units.")]
File = Annotated[Path | None, typer.Option("--hardware-file", metavar="FILE", help="Entries of your own, as TOML.")]
KINDS = {"chips": "chip", "nodes": "node", "fabrics": "fabric", "sites": "site"}


@hardware_app.command("ls")
def ls_command(as_json: Json = False, hardware_file: File = None) -> None:
    """List all entries of the catalogue."""
    from phalanx.hardware import load

    catalogue = load(hardware_file)
    if as_json:
        _print_json(catalogue)
        return
    from phalanx.hardware.in_words import tables

    for number, (header, rows) in enumerate(tables(catalogue).values()):
        if number:
            print()
        _print_table([header, *rows])


@hardware_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A chip, node, fabric or site.")],
    as_json: Json = False,
    hardware_file: File = None,
) -> None:
    """Show all figures of a chip, node, fabric or site, with their sources."""
    from phalanx.hardware import load
    from phalanx.hardware.in_words import entry

    found = load(hardware_file).find(name)
    if as_json:
        _print_json({KINDS[section]: noun for section, noun in found.items()})
        return
    for number, (section, noun) in enumerate(found.items()):
        print(f"{chr(10) if number else ''}{KINDS[section]} {noun.name}")
        _print_table([["  " + key, value, help_] for key, value, help_ in entry(section, noun)])
        for source in noun.source:
            print(f"  source: {source}")


def _print_json(what: Any) -> None:
    import dataclasses
    import json

    print(json.dumps(what, indent=2, default=dataclasses.asdict))


def _print_table(lines: list[list[str]]) -> None:
    """Print aligned columns. A terminal folds cells that are too wide for it; a file gets one line per row."""
    from rich.table import Table

    from phalanx.run.console import PlainConsole

    console = PlainConsole()
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, show_header=False)
        for column in range(len(lines[0])):
            table.add_column(no_wrap=not column, overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
