"""`phalanx plan`: find a layout for a model on a cluster, with its needs and costs. Subcommands show the arithmetic
behind it, its scaling, and how well predictions match published runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

plan_app = typer.Typer(invoke_without_command=True, help="The best layout of a model on a cluster, and its cost.")
Json = Annotated[bool, typer.Option("--json", help="For programs: SI units.")]
File = Annotated[Path | None, typer.Option("--hardware-file", metavar="FILE", help="Hardware of your own, as TOML.")]


@plan_app.callback()
def plan(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(metavar="NAME|JOB.toml", help="A preset, a published model, or a job file.")
    ] = "",
    gpus: Annotated[int, typer.Option(metavar="N", help="How many chips there are.", show_default=False)] = 0,
    hardware: Annotated[str, typer.Option(metavar="NAME", help="A chip or node of `phalanx hardware ls`.")] = "",
    tokens: Annotated[
        str, typer.Option(metavar="15T", help="To train on, such as 15T; 20 per parameter if left out.")
    ] = "",
    global_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Sequences per step; a power of two near 1,024 tokens per chip, 4 M at least, if left out.",
        ),
    ] = None,
    seq: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a sequence; the job file's, or 8192.")] = None,
    objective: Annotated[str, typer.Option(metavar="time|step|cost", help="What is to be least.")] = "time",
    days: Annotated[float | None, typer.Option(metavar="N", help="The most that a run may take.")] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="tp=8,pp=4", help="Degrees that are given; repeatable.")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option(metavar="tp=8,pp=4", help="Beside the best: the best with these; repeatable.")
    ] = None,
    precision: Annotated[str, typer.Option(metavar="bf16,fp8", help="Precisions to choose from.")] = "bf16",
    schedules: Annotated[
        str, typer.Option(metavar="NAME,NAME,…", help="Pipeline schedules to choose from, or all.")
    ] = "",
    margin: Annotated[
        float,
        typer.Option(metavar="N", help="Share of memory that must stay free beside the upper end of the prediction."),
    ] = 0.0,
    use: Annotated[float, typer.Option(metavar="N", help="Share of the chips that must be used.")] = 0.95,
    wide_tp: Annotated[
        bool, typer.Option("--wide-tp", help="Tensor parallelism beyond a scale-up domain too.")
    ] = False,
    software: Annotated[
        str, typer.Option(metavar="NAME", help="Whose speed to expect: phalanx, megatron, torchtitan, …")
    ] = "phalanx",
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speeds that `phalanx calibrate` measured on such hardware.")
    ] = None,
    fabric: Annotated[str, typer.Option(metavar="NAME", help="The network; the usual one of the node.")] = "",
    site: Annotated[str, typer.Option(metavar="NAME", help="Where it stands: power, price, grid.")] = "",
    failures: Annotated[
        float | None, typer.Option(metavar="N", help="Per 1000 node-days; the published ones if left out.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every term with its formula.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Pictures, as one page.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run one rank's program on tensors without values, and compare.")
    ] = False,
    as_json: Json = False,
    hardware_file: File = None,
) -> None:
    """Find the best layout. For example: phalanx plan --model llama3-405b --gpus 16384 --hardware h100 --tokens 15T"""
    if context.invoked_subcommand:
        return
    if not (model or gpus or hardware):
        print(context.get_help())
        raise typer.Exit
    from phalanx.cli.plan_ask import Options, ask
    from phalanx.cli.plan_text import as_dict, print_answer

    options = Options(
        model, gpus, hardware, tokens, global_batch, seq, objective, days, ",".join(pin or ()), tuple(compare or ()),
        precision, schedules, margin, use, wide_tp, software, fabric, site, failures, hardware_file, calibration,
    )  # fmt: skip
    answer = ask(options)
    if html:
        from phalanx.plan.report.html import page

        _write(html, page(answer))
    if as_json:
        _print_json(as_dict(answer))
    else:
        print_answer(answer, explain)
        if html:
            print(f"\npicture: {html}")
    if dry_run:
        from phalanx.cli.plan_dry import dry, planned_job

        if not dry(planned_job(answer.plan, model), to_stderr=as_json):
            raise typer.Exit(1)


@plan_app.command("arithmetic")
def arithmetic(as_json: Json = False) -> None:
    """The figures that very large runs are estimated with, each with its formula."""
    from phalanx.hardware import load
    from phalanx.plan.report.arithmetic import lines

    rows = lines(load())
    if as_json:
        _print_json([{**r.figures, "quantity": r.quantity, "formula": r.formula, "result": r.result} for r in rows])
        return
    from phalanx.cli.hardware import _print_table

    _print_table([["quantity", "formula", "result"], *([r.quantity, r.formula, r.result] for r in rows)])


@plan_app.command("validate")
def validate_command(
    runs: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUNS.csv",
            help="Published runs; columns as in plan/lab/published_runs.csv. The packaged ones if left out.",
        ),
    ] = None,
    as_json: Json = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every row: measured, predicted, memory.")] = False,
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit everything afresh without each source, which takes minutes.")
    ] = False,
    hardware_file: File = None,
) -> None:
    """Score the predictions on runs that were really run: a row that the numbers were fitted to is predicted with its
    whole source left out of the fit."""
    from phalanx.hardware import load
    from phalanx.plan.lab.validate import validate

    if refit:
        print("fitting everything without each source in turn, which takes minutes", file=sys.stderr)
    result = validate(runs, load(hardware_file), refit)
    if as_json:
        _print_json(result.to_json())
        return
    from phalanx.cli.plan_scores import print_validation

    print_validation(result, rows)


@plan_app.command("scaling")
def scaling_command(
    model: Annotated[str, typer.Option(metavar="NAME|JOB.toml", help="A preset, a published model, or a job file.")],
    hardware: Annotated[str, typer.Option(metavar="NAME", help="A chip or node of `phalanx hardware ls`.")] = "h100",
    sizes: Annotated[str, typer.Option(metavar="8,64,512", help="Numbers of chips; 8 to a million if left out.")] = "",
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="The curves, as one page.")] = None,
    as_json: Json = False,
    hardware_file: File = None,
) -> None:
    """What a chip contributes as the cluster grows, with failures: laid out well, and over one flat ring."""
    from phalanx.cli.plan_ask import Options, parse_sizes, request
    from phalanx.hardware import load
    from phalanx.twin.scaling import SIZES, curves, page, text

    catalogue = load(hardware_file)
    given = parse_sizes(sizes) if sizes else SIZES
    found = curves(lambda n: request(Options(model, n, hardware), catalogue.cluster(hardware, n)), given)
    if html:
        _write(html, page([found]))
    if as_json:
        _print_json(found.to_json())
        return
    print("\n".join(text(found)))
    if html:
        print(f"\npicture: {html}")


def _print_json(what: Any) -> None:
    import json

    print(json.dumps(what, indent=2))


def _write(path: Path, page: str) -> None:
    from phalanx.core.errors import UserError

    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there and that you may write to"
        raise UserError(f"cannot be written: {error.strerror}", field="html", value=str(path), remedy=remedy) from None
