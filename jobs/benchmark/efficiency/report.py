"""The figures of efficiency: medians with their spread, when a cache pays, tables and the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

from rich.table import Table

from jobs.benchmark.efficiency.samples import Built, Found, Sample
from jobs.benchmark.shown import figure_table
from pipeline.evaluate.table import method_title
from pipeline.rows import JsonObject

MIB, GIB = 2**20, 2**30


class Spread(NamedTuple):
    """The median and range of a figure over all questions and repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One method at one ratio.

    Attributes:
        figures: by the names in _ONLINE, _CACHED and _BUILT; one that no sample has is missing.
        break_even: see :func:`break_even`.
        same_answers: whether every answer was the same tokens from both.
    """

    method: str
    retention_ratio: float
    figures: dict[str, Spread]
    online_peak_bytes: float | None
    cached_peak_bytes: float | None
    break_even: int | None
    same_answers: bool


#: Names of figures -> what a sample from the video has: seconds a question, tokens a second, tokens, bytes. The LLM's
#: seconds with the tower are encoding, pruning and the whole ``generate``, as the paper counts; ``llm_s`` is that
#: without the vision tower and without pruning before the prompt. ``online_s`` is the paper's E2E, from the video to
#: the answer.
_ONLINE = {
    **{name: name for name in ("video_decode_s", "encode_s", "prune_s", "prompt_s", "prefill_s", "token_decode_s")},
    **{name: name for name in ("llm_s", "llm_with_tower_s", "prefill_rate", "decode_rate")},
    **{name: name for name in ("visual_tokens", "prompt_tokens", "kv_bytes")},
    "online_s": "total_s",
}
#: Likewise of a sample from the cache.
_CACHED = {"read_s": "read_s", "bytes_read": "bytes_read", "cached_llm_s": "llm_s", "cached_s": "total_s"}
#: Likewise of a video that is put into a cache: decoding, encoding, pruning and writing together, and writing alone.
_BUILT = {"build_s": "total_s", "write_s": "write_s"}
_MEDIANS = {"visual_tokens", "prompt_tokens", "kv_bytes", "bytes_read"}  # whose range the record leaves out


def break_even(build_s: float, cached_s: float, online_s: float) -> int | None:
    """Return the number of questions from which building a cache and asking it takes less time than asking videos.

    That is the smallest q with build_s + q * cached_s <= q * online_s, or None where there is none.
    """
    saved = online_s - cached_s
    if saved <= 0:
        return None
    questions = max(1, math.ceil(build_s / saved))
    # Rounding of the quotient can be off by one step to either side.
    for q in (questions - 1, questions, questions + 1):
        if q >= 1 and build_s + q * cached_s <= q * online_s:
            return q
    return None


def summarise(found: Found) -> Row:
    """Compute an arm's table row: medians and ranges of its measurements."""
    figures = {}
    for names, measured in ((_ONLINE, found.online), (_CACHED, found.cached), (_BUILT, found.built)):
        for name, field in names.items():
            if values := [value for one in measured if (value := getattr(one, field)) is not None]:
                figures[name] = Spread(median(values), min(values), max(values))
    return Row(
        method=found.arm.method,
        retention_ratio=found.arm.retention_ratio,
        figures=figures,
        online_peak_bytes=found.online_peak,
        cached_peak_bytes=found.cached_peak,
        break_even=break_even(*(figures[name].median for name in ("build_s", "cached_s", "online_s"))),
        same_answers=_answers(found.online) == _answers(found.cached),
    )


def _answers(samples: Sequence[Sample]) -> dict[tuple[str, int, int], tuple[int, ...]]:
    """Return the answer's token ids by (video, question, repeat)."""
    return {(sample.video_id, sample.question, sample.repeat): sample.answer for sample in samples}


def tables(rows: Sequence[Row], title: str, memory: str) -> list[Table]:
    """Lay out three tables: the paper's columns, their parts, and online beside cached; ``memory`` titles the peak."""
    full = rows[0]
    names = [
        (method_title(row.method) if row is not full else "Original", f"{100 * row.retention_ratio:g}%") for row in rows
    ]

    def table(of: str, columns: Sequence[str], cells: Callable[[Row], Iterator[str]]) -> Table:
        lines = [(*name, *cells(row)) for name, row in zip(names, rows, strict=True)]
        return figure_table(of, ("method", "kept", *columns), lines)

    return [
        table(
            f"{title}\nonline, seconds a question: median (lowest to highest); in % the change to full retention",
            ("visual tokens", "E2E s", "LLM s with tower", "LLM s without tower", memory, "KV MiB"),
            lambda row: _paper_cells(row, full),
        ),
        table(
            "parts of it, medians; tokens/s of the prompt, and of the answer after its first token",
            (
                *("read video s", "encode s", "prune s", "prompt s"),
                *("prefill s", "prefill tokens/s", "decode s", "decode tokens/s"),
            ),
            _part_cells,
        ),
        table(
            "from the video (online) and from a cache of its tokens (no vision tower in memory): seconds a question, "
            "seconds to cache a video,\nand from how many questions about a video on caching takes less time",
            (
                *("online s", "cached s", "of it read s", "of it LLM s", "read MB", memory),
                *("build s", "of it write s", "break-even", "same answers"),
            ),
            _mode_cells,
        ),
    ]


def _paper_cells(row: Row, full: Row) -> Iterator[str]:
    """Yield the paper's columns of a row, with the changes to full retention."""
    kv, full_kv = (one.figures["kv_bytes"].median for one in (row, full))
    yield f"{row.figures['visual_tokens'].median:.0f}"
    for name in ("online_s", "llm_with_tower_s", "llm_s"):
        yield f"{_wide(row.figures[name])}{_change(row.figures[name].median, full.figures[name].median)}"
    yield f"{_gib(row.online_peak_bytes)}{_change(row.online_peak_bytes, full.online_peak_bytes)}"
    yield f"{kv / MIB:.1f}{_change(kv, full_kv)}"


def _part_cells(row: Row) -> Iterator[str]:
    """Yield the seconds of each part, and the rates of tokens."""
    yield from _medians(row, "video_decode_s", "encode_s", "prune_s", "prompt_s", "prefill_s")
    yield f"{row.figures['prefill_rate'].median:.0f}"
    yield from _medians(row, "token_decode_s")
    yield f"{row.figures['decode_rate'].median:.1f}" if "decode_rate" in row.figures else ""


def _mode_cells(row: Row) -> Iterator[str]:
    """Yield the columns of online beside cached."""
    yield from (_wide(row.figures["online_s"]), _wide(row.figures["cached_s"]))
    yield from _medians(row, "read_s", "cached_llm_s")
    yield from (f"{row.figures['bytes_read'].median / 1e6:.2f}", _gib(row.cached_peak_bytes))
    yield from _medians(row, "build_s", "write_s")
    yield "never" if row.break_even is None else str(row.break_even)
    yield "yes" if row.same_answers else "NO"


def _medians(row: Row, *names: str) -> Iterator[str]:
    """Yield medians in seconds."""
    return (_seconds(row.figures[name].median) for name in names)


def _wide(value: Spread) -> str:
    """Format a spread in seconds: "median (lowest-highest)"."""
    return f"{_seconds(value.median)} ({_seconds(value.low)}-{_seconds(value.high)})"


def _seconds(value: float) -> str:
    """Format seconds with three decimals below 10, else one."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _gib(value: float | None) -> str:
    """Format bytes as GiB, "" for None."""
    return "" if value is None else f"{value / GIB:.2f}"


def _change(value: float | None, full: float | None) -> str:
    """Format the change to full retention, " -12.9%"; nothing for full retention itself."""
    return "" if value is None or not full or value == full else f" {value / full - 1:+.1%}"


def as_record(rows: Sequence[Row], found: Sequence[Found]) -> JsonObject:
    """Return the JSON-able rows and every sample, in seconds and bytes."""

    def listed(one: Found, measured: Sequence[Sample] | Sequence[Built]) -> list[JsonObject]:
        arm: JsonObject = {"method": one.arm.method, "retention_ratio": one.arm.retention_ratio}
        return [{**arm, **asdict(item), "total_s": item.total_s} for item in measured]

    def line(row: Row) -> JsonObject:
        about = {name: value for name, value in vars(row).items() if name != "figures"}
        figures = {name: one.median if name in _MEDIANS else one._asdict() for name, one in row.figures.items()}
        return {**about, "decode_rate": None, **figures}

    samples = [item for one in found for item in listed(one, [*one.online, *one.cached])]
    return {
        "rows": list(map(line, rows)),
        "samples": samples,
        "built": [item for one in found for item in listed(one, one.built)],
    }
