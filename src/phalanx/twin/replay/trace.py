"""Read job traces: CSV with the columns job_id, submit_s, gpus, duration_s and optionally vc. Other columns are
ignored. Times are kept as whole nanoseconds. Every error names the file, the line, the column and the remedy."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import UserError

NEEDED = ("job_id", "submit_s", "gpus", "duration_s")
VC = "vc"
S = 10**9
NUMBER = re.compile(r"([+-]?)(\d{1,18})(?:\.(\d{0,18}))?(?:[eE]([+-]?\d{1,3}))?")
MOST_S = 10**11  # about 3,000 years
MOST_GPUS = 10**7


@dataclass(frozen=True, slots=True)
class Job:
    number: int  # in the order of submission
    name: str
    submit_ns: int
    gpus: int
    duration_ns: int
    vc: str
    line: int


@dataclass(frozen=True, slots=True)
class Trace:
    jobs: list[Job]  # ordered by submission time
    skipped: int  # number of rows that ask for no GPU

    def between(self, begin_s: float | None, end_s: float | None) -> Trace:
        """Keep the jobs submitted from `begin_s` on and before `end_s`."""
        least, most = (None if s is None else round(s * S) for s in (begin_s, end_s))
        kept = [
            j for j in self.jobs if (least is None or j.submit_ns >= least) and (most is None or j.submit_ns < most)
        ]
        if not kept:
            remedy = "widen --from and --to; both are seconds of the column submit_s"
            raise UserError("no job was submitted in that time", field="--from", value=begin_s, remedy=remedy)
        return Trace(kept, self.skipped)


def read(path: Path) -> Trace:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return parse(file, str(path))
    except OSError as error:
        remedy = "name a CSV file that you may read"
        raise UserError(f"it cannot be read: {error.strerror}", field="TRACE", value=str(path), remedy=remedy) from None
    except UnicodeDecodeError:
        remedy = "save it as CSV in UTF-8"
        raise UserError("it is not text in UTF-8", field="TRACE", value=str(path), remedy=remedy) from None
    except csv.Error as error:
        raise UserError(f"it is not CSV: {error}", field="TRACE", value=str(path), remedy="save it as CSV") from None


def parse(lines: Iterable[str], file: str) -> Trace:
    rows = csv.reader(lines, skipinitialspace=True)
    columns = _columns(next(rows, []), file)
    jobs, skipped = list[Job](), 0
    for row, line in _rows(rows):
        cells = [_cell(row, at, name, file, line) for name, at in columns.items()]
        gpus = _gpus(cells[2], file, line)
        if not gpus:
            skipped += 1
            continue
        submit_ns = _time(cells[1], "submit_s", file, line)
        duration_ns = _time(cells[3], "duration_s", file, line)
        if duration_ns < 0:
            raise _wrong(file, line, "duration_s", cells[3], "a job cannot end before it starts", "give 0 or more")
        jobs.append(Job(0, cells[0], submit_ns, gpus, duration_ns, cells[4] if len(cells) > 4 else "", line))
    if not jobs:
        remedy = "give at least one row with a job that asks for a GPU"
        raise UserError("the trace has no jobs", field="TRACE", value=file, remedy=remedy)
    jobs.sort(key=lambda job: job.submit_ns)  # stable: rows of one second keep their order
    ordered = [Job(i, j.name, j.submit_ns, j.gpus, j.duration_ns, j.vc, j.line) for i, j in enumerate(jobs)]
    return Trace(ordered, skipped)


def _rows(rows: Iterator[list[str]]) -> Iterator[tuple[list[str], int]]:
    """Yield rows that are not blank, each with the number of its last line."""
    for row in rows:
        if any(cell.strip() for cell in row):
            yield row, rows.line_num  # type: ignore[attr-defined]


def _columns(header: list[str], file: str) -> dict[str, int]:
    names = [cell.strip().lower() for cell in header]
    for name in NEEDED:
        if name not in names:
            said = ", ".join(filter(None, names)) or "nothing"
            remedy = f"the first line names the columns: {','.join(NEEDED)}[,{VC}]; it has {said}"
            raise _wrong(file, 1, name, None, "there is no such column", remedy)
    return {name: names.index(name) for name in (*NEEDED, VC) if name in names}


def _cell(row: list[str], at: int, name: str, file: str, line: int) -> str:
    if at >= len(row):
        raise _wrong(file, line, name, None, f"the line has only {len(row)} columns", "give every column of the header")
    return row[at].strip()


def _gpus(text: str, file: str, line: int) -> int:
    found = NUMBER.fullmatch(text)
    value = _scaled(text, 1) if found else None
    if value is None or not 0 <= value <= MOST_GPUS:
        raise _wrong(file, line, "gpus", text, "it is not a whole number of GPUs", "give 1 or more; 0 skips the row")
    return value


def _time(text: str, column: str, file: str, line: int) -> int:
    value = _scaled(text, S, exact=False) if NUMBER.fullmatch(text) else None
    if value is None or abs(value) > MOST_S * S:
        raise _wrong(file, line, column, text, "it is not a number of seconds", "give seconds, such as 3600 or 0.5")
    return value


def _scaled(text: str, scale: int, exact: bool = True) -> int | None:
    """Return the number times `scale`, computed with whole numbers only. None: the result must be whole (`exact`) and
    is not."""
    if text.isascii() and text.isdigit():
        return int(text) * scale
    found = NUMBER.fullmatch(text)
    assert found
    sign, whole, part, power = found[1], found[2], found[3] or "", int(found[4] or 0)
    digits, places = int(whole + part) * scale, len(part) - power
    value, rest = (digits * 10**-places, 0) if places <= 0 else divmod(digits, 10**places)
    if exact and rest:
        return None
    return -value if sign == "-" else value


def _wrong(file: str, line: int, column: str, value: object, message: str, remedy: str) -> UserError:
    return UserError(f"{message} (file {file}, line {line})", field=f"column {column}", value=value, remedy=remedy)
