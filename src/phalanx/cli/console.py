"""The live view of a run in a terminal; plain lines when there is none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from phalanx.core.job import Job

PLAIN_EVERY_S = 5.0


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{seconds:02d}s"


def flops(value: float) -> str:
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1e9:.0f} GFLOP/s"


class Console:
    def __init__(self, job: Job, out: rich.console.Console | None = None):
        self.job, self.out = job, out or rich.console.Console(highlight=False)
        self._live: Live | None = None
        self._last_plain = 0.0
        self._recent: list[float] = []

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    # -- what the run tells ------------------------------------------------------------------------

    def starting(self, run_dir: Path) -> None:
        self.out.print(f"[bold]{self.job.name}[/] on {self.job.layout.describe()}")
        self.out.print(f"record: {run_dir}", soft_wrap=True)

    def note(self, text: str) -> None:
        self.out.print(text)

    def facts(self, facts: dict[str, Any]) -> None:
        self.out.print(
            f"model: {facts['num_params']:,} parameters in {self.job.train.precision} "
            f"on {facts['device']}, torch {facts['torch']}"
        )
        self.out.print(f"MFU: {facts['mfu']} = {flops(facts['peak_flops'])}", soft_wrap=True)
        if self.out.is_terminal:
            self._live = Live(console=self.out, refresh_per_second=8)
            self._live.start()

    def step(self, row: dict[str, Any]) -> None:
        self._recent = [*self._recent[-19:], row["time_s"]]
        left = self.job.train.steps - row["step"] - 1
        eta = left * sum(self._recent) / len(self._recent)
        if self._live:
            self._live.update(self._view(row, eta))
        elif time.monotonic() - self._last_plain > PLAIN_EVERY_S or left == 0:
            self._last_plain = time.monotonic()
            text = "  ".join(f"{k} {v}" for k, v in self._cells(row, eta).items())
            self.out.print(text, soft_wrap=True)

    def finished(self, s: dict[str, Any]) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        table = Table(box=None, pad_edge=False, show_header=False)
        bits = f"{s['last_loss']:.3f} nats per token (mean of the last 10 steps), from {s['first_loss']:.3f}"
        table.add_row("loss", bits)
        below = s["unigram_entropy"] - s["last_loss"]
        compared = f"{below:.3f} below" if below > 0 else f"{-below:.3f} ABOVE"
        table.add_row("unigram entropy", f"{s['unigram_entropy']:.3f} nats; the loss is {compared} it")
        table.add_row("speed", f"{s['tokens_per_s']:,.0f} tokens/s, median step {s['median_step_s'] * 1e3:.0f} ms")
        if "mfu" in s:
            table.add_row("MFU", f"{s['mfu']:.1%}")
        table.add_row("time", f"{duration(s['wall_s'])}, of which {s['start_s']:.1f} s to start")
        table.add_row("determinism", self.job.promise)
        table.add_row("record", s["run_dir"])
        self.out.print()
        self.out.print(table, soft_wrap=True)

    # -- drawing -----------------------------------------------------------------------------------

    def _cells(self, row: dict[str, Any], eta: float) -> dict[str, str]:
        times = "/".join(f"{row[k] * 1e3:.0f}" for k in ("time_min_s", "time_median_s", "time_s"))
        return {
            "step": f"{row['step'] + 1}/{self.job.train.steps}",
            "loss": f"{row['loss']:.4f}",
            "grad norm": f"{row['grad_norm']:.3f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "MFU": "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "step ms min/med/max": times,
            "ETA": duration(eta),
        }

    def _view(self, row: dict[str, Any], eta: float) -> Table:
        cells = self._cells(row, eta)
        table = Table(box=None, pad_edge=False)
        for name in cells:
            table.add_column(name, justify="right", header_style="dim")
        table.add_row(*cells.values())
        grid = Table.grid()
        grid.add_row(table)
        grid.add_row(ProgressBar(total=self.job.train.steps, completed=row["step"] + 1, width=60))
        return grid
