"""`phalanx generate`: continue a text with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer


def generate(
    path: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a run or folder whose newest good one is taken."),
    ],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text that is continued.")] = "",
    tokens: Annotated[int, typer.Option(metavar="N", help="The most tokens to write.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(metavar="N", help="0 always takes the likeliest token.", min=0.0)] = 0.8,
    top_k: Annotated[
        int, typer.Option(metavar="N", help="Choose among the k likeliest tokens; 0: among all.", min=0)
    ] = 50,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed writes the same text.", min=0)] = 0,
    tokenizer: Annotated[
        str, typer.Option(metavar="byte|FILE", help="The tokenizer, if the checkpoint does not name one.")
    ] = "",
) -> None:
    """Continue a prompt with a trained model: `phalanx generate runs/quickstart-... "def main("`."""
    from phalanx.cli.checkpoint import newest

    where = newest(path)
    from phalanx.train.sampler import Sampler

    print(prompt, end="", flush=True)
    for piece in Sampler(where, tokenizer).write(prompt, tokens, temperature, top_k, seed):
        print(piece, end="", flush=True)
    print()
