"""Check the form of the folds that nodes send (`observe.fold`). Aggregators merge them with those of other nodes, and
the record keeper computes with them. A malformed fold is refused on arrival, because it must not end a process that
others need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from phalanx.core.errors import MOST_INT
from phalanx.observe.fold import SLOWEST, Fold, Spans, size

MOST_RANK = 1 << 24
MOST_BIN = 70_000  # of step times: its exponential is a float
MOST_AGO_S = 30 * 86_400
MOST_SUM = 1 << 200  # of validation losses: divided by the tokens, it is a float
OPTIONAL = frozenset({"readings", "ago_s"})
Check = Callable[[Any], bool]
_FLOAT, _NUMBERS, _TEXT = {float}, {float, int}, {str}


def check(fold: Fold, most_ranks: int) -> None:
    """Raise a ValueError that says what is wrong if this is no valid fold of at most `most_ranks` ranks."""
    known = FORMS.get(str(fold.get("type")))
    if known is None:
        raise ValueError(f"type = {fold.get('type')!r:.200}: expected one of {sorted(FORMS)}")
    for name, is_right in known.items():
        if (name in fold or name not in OPTIONAL) and not is_right(fold.get(name, ...)):
            raise ValueError(f"{fold['type']}.{name} = {str(fold.get(name))[:200]!r} has no known form")
    ranks = fold["ranks"]
    if size(ranks) > most_ranks:
        raise ValueError(f"{fold['type']}.ranks = {str(ranks)[:200]}: expected at most {most_ranks} ranks of a node")
    own = {rank for first, end in ranks for rank in range(first, end)}
    for name, named in _named(fold):
        if not own.issuperset(named):
            raise ValueError(f"{fold['type']}.{name} = {str(fold[name])[:200]} names a rank that is not of this fold")


def _named(fold: Fold) -> Iterator[tuple[str, Iterable[int]]]:
    """Yield each field that names ranks, with those ranks."""
    if fold["type"] == "step":
        yield "norms", _members(fold["norms"].values())
        yield "slowest", (rank for _, rank in fold["slowest"])
        yield "times", map(int, fold["times"][1])
    elif fold["type"] == "done":
        yield "digests", _members(ranks for _, ranks in fold["digests"])


def _members(many: Iterable[Spans]) -> Iterator[int]:
    return (rank for spans in many for first, end in spans for rank in range(first, end))


# -- values


def _is_int(value: Any) -> bool:
    return type(value) is int and -MOST_INT < value < MOST_INT


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) is float or _is_int(value)


def _are_numbers(values: Iterable[Any]) -> bool:
    kinds = {*map(type, values)}
    return kinds <= _FLOAT or (kinds <= _NUMBERS and all(map(_is_number, values)))


def _are_texts(values: Iterable[Any]) -> bool:
    return {*map(type, values)} <= _TEXT


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST_RANK


def _is_spans(value: Any) -> bool:
    """Check that spans are ascending, disjoint and not empty."""
    last = -1
    for span in value if type(value) is list else [None]:
        if type(span) is not list or len(span) != 2 or not all(map(_is_count, span)):
            return False
        if not last < span[0] < span[1] <= MOST_RANK:
            return False
        last = span[1]
    return last > 0


def _every(is_right: Check) -> Check:
    return lambda values: all(map(is_right, values))


def _list_of(are_right: Check, least: int = 0) -> Check:
    return lambda value: type(value) is list and len(value) >= least and are_right(value)


def _dict_of(are_right: Check, are_keys: Check = _are_texts) -> Check:
    return lambda value: type(value) is dict and are_keys(value) and are_right(value.values())


def _exactly(*checks: Check) -> Check:
    """Accept a list with one value for each check."""
    return lambda value: (
        type(value) is list and len(value) == len(checks) and all(ok(v) for ok, v in zip(checks, value, strict=True))
    )


def _fields(**checks: Check) -> Check:
    """Accept a dictionary that has these keys, and possibly others."""
    return lambda value: type(value) is dict and all(name in value and ok(value[name]) for name, ok in checks.items())


def _is_norm(text: Any) -> bool:
    try:
        float.fromhex(text)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_digits(text: Any) -> bool:
    return type(text) is str and len(text) < 20 and text.removeprefix("-").isdecimal() and text.isascii()


def _is_bin(text: Any) -> bool:
    return _is_digits(text) and abs(int(text)) <= MOST_BIN


def _is_reading(value: Any) -> bool:
    """Check a reading: count, sum, least, its rank, most, its rank."""
    if type(value) is not list or len(value) != 6 or not _are_numbers(value):
        return False
    count, _, _, low_at, _, high_at = value
    return _is_count(count) and count > 0 and _is_rank(low_at) and _is_rank(high_at)


def _is_whole(value: Any) -> bool:
    """Check what one rank reports for its replica; None means that another rank reports it."""
    if value is None:
        return True
    if not _WHOLE(value) or ("skipped" in value and not _SKIPPED(value["skipped"])):
        return False
    record = value.get("record", "")
    return type(record) is str and "\n" not in record


def _is_digest(value: Any) -> bool:
    return value is None or _TEXTS(value)


def _is_sum(value: Any) -> bool:
    """Check a sum of validation losses. None means that one was not finite."""
    return value is None or (type(value) is int and -MOST_SUM < value < MOST_SUM)


_TEXTS = _dict_of(_are_texts)
_WHOLE = _fields(loss_sums=_list_of(_are_numbers, 1), tokens=_is_count, data_digest=_is_text)
_SKIPPED = _fields(reason=_is_text, places=_list_of(_every(_exactly(_is_count, _is_count))))
_EXPERTS = _fields(load=_is_number, layer=_is_text)
_is_slow = _exactly(_is_number, _is_rank)
_is_one_by_one = _exactly(lambda block: block == 1 and type(block) is int, _dict_of(_are_numbers, _every(_is_digits)))

FORMS: dict[str, dict[str, Check]] = {
    "step": {
        "ranks": _is_spans,
        "generation": _is_count,
        "step": _is_count,
        "lr": _is_number,
        "time_s": _is_number,
        "time_min_s": _is_number,
        "ago_s": lambda value: _is_number(value) and 0 <= value < MOST_AGO_S,
        "slowest": lambda value: _list_of(_every(_is_slow), 1)(value) and len(value) <= SLOWEST,
        "bins": _dict_of(_every(_is_count), _every(_is_bin)),
        "times": _is_one_by_one,
        "norms": lambda value: bool(value) and _dict_of(_every(_is_spans), _every(_is_norm))(value),
        "data_wait_s": _is_number,
        "data_ready": _is_number,
        "phases": _dict_of(_are_numbers),
        "held": _dict_of(_every(_is_int)),
        "served": _dict_of(_every(_is_int)),
        "readings": _dict_of(_every(_is_reading)),
        "experts": lambda value: value == {} or _EXPERTS(value),
        "whole": _is_whole,
    },
    "facts": {
        "ranks": _is_spans,
        "device": _is_text,
        "peak_flops": _is_number,
        "peak_source": _is_text,
        "num_params": _is_count,
        "torch": _is_text,
    },
    "entered": {
        "ranks": _is_spans,
        "generation": _is_count,
        "source": _is_text,
        "restore_s": _is_number,
        "form_s": _is_number,
    },
    "done": {
        "ranks": _is_spans,
        "step": _is_count,
        "memory_bytes": _is_int,
        "digests": _list_of(_every(_exactly(_is_digest, _is_spans)), 1),
    },
    "validation": {
        "ranks": _is_spans,
        "generation": _is_count,
        "step": _is_count,
        "sums": _dict_of(_every(_is_sum)),
        "tokens": _dict_of(_every(_is_count)),
        "time_s": _is_number,
    },
}
