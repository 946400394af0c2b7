"""The live view of a run in a terminal, or plain lines without one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import rich.console
from rich.console import RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from phalanx.core.job import Job
from phalanx.observe.words import printable
from phalanx.run.planned import Forecast

PLAIN_EVERY_S = 5.0


class PlainConsole(rich.console.Console):
    """Prints the user's names as they are: a path may hold [brackets] and :colons:."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError; rich would exit the process, and leave the run without its record


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def flops(value: float) -> str:
    for unit, size in (("EFLOP/s", 1e18), ("PFLOP/s", 1e15), ("TFLOP/s", 1e12)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value / 1e9:.0f} GFLOP/s"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}" if share >= 0.01 else f"{share:.3%}"


def spent(run_dir: Path) -> dict[str, str]:
    """Summarise where the GPU-seconds of a run went, and what broke."""
    from phalanx.observe.story import Story

    story = Story(run_dir)
    if not story.rows:
        return {}
    good = story.goodput()
    parts = sorted((row["share"], row["state"]) for row in good["states"] if row["state"] != "productive")
    rest = ", ".join(f"{state} {percent(share)}" for share, state in reversed(parts[-3:]) if share > 0)
    out = {"goodput": f"{percent(good['ratio'])} of {good['gpu_s']:,.0f} GPU-seconds; {rest}"}
    incidents = story.incidents()
    if incidents:
        told = [f"{one.subject} {one.what}" for one in incidents[:3]]
        more = f" and {len(incidents) - 3} more" if len(incidents) > 3 else ""
        out["incidents"] = printable(f"{len(incidents)}: {'; '.join(told)}{more} (`phalanx runs show {run_dir}`)")
    return out


def _balanced(s: dict[str, Any]) -> dict[str, str]:
    """Describe how evenly the experts were used in the last step, if there are any."""
    if not (found := s.get("experts")):
        return {}
    busiest = f"the busiest has {found['load']:.2f}x the mean tokens in {found['layer']}"
    return {"experts": f"{busiest}, where {found['idle']} had none"}


def _validated(summary: dict[str, Any]) -> dict[str, str]:
    if not (last := summary.get("validation")):
        return {}
    bits = f", {last['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in last else ""
    best = summary["best_validation"]
    more = f"; best {best['loss']:.4f} after step {best['step']:,}" if best and best["step"] != last["step"] else ""
    return {"validation": f"{last['loss']:.4f} nats per token, perplexity {last['perplexity']:.2f}{bits}{more}"}


class Console:
    """Shows one run. `forecast`: the planner's expectation of it."""

    def __init__(self, job: Job, forecast: Forecast | None = None, out: rich.console.Console | None = None):
        self.job, self.forecast, self.out = job, forecast, out or PlainConsole()
        self._live: Live | None = None
        self._view: RenderableType | None = None
        self._last_plain = -PLAIN_EVERY_S
        self._recent: list[float] = []

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_live()

    # -- events of the run -------------------------------------------------------------------------

    def starting(self, run_dir: Path) -> None:
        self._line(f"{self.job.name} on {self.job.layout.describe()}")
        for line in self.forecast.why if self.forecast else ():
            self._line(line)
        self._line(f"record: {run_dir}")
        if self.out.is_interactive:
            self._live = Live(console=self.out, refresh_per_second=8, transient=True)
            self._live.start()

    def status(self, text: str) -> None:
        if self._live:
            self._live.update(Spinner("line", Text(printable(text), style="dim", overflow="ellipsis", no_wrap=True)))

    def note(self, text: str) -> None:
        self._line(text)

    def facts(self, facts: dict[str, Any]) -> None:
        self._line(
            f"model: {facts['num_params']:,} parameters in {self.job.train.precision} "
            f"on {facts['device']}, torch {facts['torch']}"
        )
        self._line(f"MFU: of {flops(facts['peak_flops'])} ({facts['peak_source']}); {facts['mfu']}")

    def step(self, row: dict[str, Any]) -> None:
        self._recent = [*self._recent[-19:], row["time_s"]]
        done = row["step"] + 1
        eta = (self.job.train.steps - done) * sum(self._recent) / len(self._recent)
        if self._live:
            self._view = self._draw(self._cells(row, eta), done)
            self._live.update(self._view)
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S or done == self.job.train.steps:
            self._last_plain = time.monotonic()
            self._line("  ".join(f"{name} {value}" for name, value in self._cells(row, eta).items()))

    def measure(self, row: dict[str, Any]) -> None: ...

    def checkpoint(self, event: dict[str, Any]) -> None: ...

    def validation(self, event: dict[str, Any]) -> None: ...

    def finished(self, s: dict[str, Any]) -> None:
        self._stop_live()
        rows = {
            **(self._learned(s) if s["steps"] else {"steps": "all of them are in the record of another controller"}),
            "time": f"{duration(s['wall_s'])}, including {s['start_s']:.1f} s to start the ranks",
            **spent(Path(s["run_dir"])),
            "determinism": self.job.promise,
            "record": s["run_dir"],
        }
        self.out.print()
        if not self.out.is_terminal:
            for name, value in rows.items():
                self._line(f"{name:<15}  {value}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="dim")
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, printable(value))
        self.out.print(table)

    def _learned(self, s: dict[str, Any]) -> dict[str, str]:
        below, averaged = s["unigram_entropy"] - s["last_loss"], min(10, s["steps"])
        compared = f"{below:.3f} below" if below > 0 else f"{-below:.3f} ABOVE"
        entropy = {"unigram entropy": f"{s['unigram_entropy']:.3f} nats; the loss is {compared} it"}
        speed = f"{s['tokens_per_s']:,.0f} tokens/s, median step {s['median_step_s'] * 1e3:,.0f} ms"
        return {
            "loss": f"{s['first_loss']:.3f} -> {s['last_loss']:.3f} nats per token (mean of the last {averaged})",
            **_validated(s),
            **(entropy if s["unigram_entropy"] else {}),  # 0: another controller read the data
            "speed": speed + (f", MFU {percent(s['mfu'])}" if "mfu" in s else ""),
            **_balanced(s),
            **({"forecast": self.forecast.compared(s)} if self.forecast else {}),
        }

    # -- drawing -----------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        """Print a line: long lines break at words in a terminal, and not at all elsewhere. Control characters are made
        harmless."""
        self.out.print(printable(text), soft_wrap=not self.out.is_terminal)

    def _stop_live(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
            if self._view:
                self.out.print(self._view)

    def _cells(self, row: dict[str, Any], eta: float) -> dict[str, str]:
        times = "/".join(f"{row[k] * 1e3:.0f}" for k in ("time_min_s", "time_median_s", "time_s"))
        steps = str(self.job.train.steps)
        return {
            "step": f"{row['step'] + 1:>{len(steps)}}/{steps}",
            "loss": f"{row['loss']:.4f}",
            "grad norm": f"{row['grad_norm']:.3f}",
            "tokens/s": f"{row['tokens_per_s']:,.0f}",
            "MFU": percent(row["mfu"]),
            "goodput": percent(row.get("goodput")),
            "step ms min/med/max": times,
            "ETA": duration(eta),
        }

    def _draw(self, cells: dict[str, str], done: int) -> RenderableType:
        """Draw one row, or one line per cell if the terminal is too narrow."""
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in cells:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(*cells.values())
        width = Measurement.get(self.out, self.out.options.update(width=10_000), table).maximum
        if width > self.out.width:
            table = Table.grid(padding=(0, 2))
            for cell in cells.items():
                table.add_row(*cell)
        bar = ProgressBar(total=self.job.train.steps, completed=done, width=min(width, self.out.width))
        view = Table.grid()
        view.add_row(table)
        view.add_row(bar)
        return view
