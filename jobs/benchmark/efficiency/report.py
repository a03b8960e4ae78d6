"""The figures of efficiency: medians with their spread, when a cache pays, tables and the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import NamedTuple

from rich.table import Table

from jobs.benchmark.efficiency.samples import Built, Found, Sample
from pipeline.evaluate.statistics.render import method_title
from pipeline.rows import Json, JsonObject

MIB, GIB = 2**20, 2**30


class Spread(NamedTuple):
    """The median and range of a figure over all questions and repeats."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One method at one ratio; seconds a question (``build_s`` a video), tokens a second, bytes.

    Attributes:
        visual_tokens, prompt_tokens, kv_bytes, bytes_read: medians.
        llm_with_tower_s: encoding, pruning and the whole ``generate``, as the paper counts; ``llm_s`` is that without
            the vision tower and without pruning before the prompt.
        online_s: from the video to the answer, the paper's E2E; ``cached_s`` from the cache to the answer.
        build_s: decoding, encoding, pruning and writing a video into the cache.
        decode_rate: None where an answer has one token.
        break_even: see :func:`break_even`.
        same_answers: whether every answer was the same tokens from both.
    """

    method: str
    retention_ratio: float
    visual_tokens: float
    prompt_tokens: float
    kv_bytes: float
    video_decode_s: Spread
    encode_s: Spread
    prune_s: Spread
    prompt_s: Spread
    prefill_s: Spread
    prefill_rate: Spread
    token_decode_s: Spread
    decode_rate: Spread | None
    llm_s: Spread
    llm_with_tower_s: Spread
    online_s: Spread
    read_s: Spread
    cached_llm_s: Spread
    cached_s: Spread
    write_s: Spread
    build_s: Spread
    bytes_read: float
    online_peak_bytes: float | None
    cached_peak_bytes: float | None
    break_even: int | None
    same_answers: bool


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
    """Compute an arm's table row: medians and spreads of its measurements."""
    online, cached, built = found.online, found.cached, found.built

    def of(value: Callable[[Sample], float], samples: Sequence[Sample] = online) -> Spread:
        return spread(value(sample) for sample in samples)

    online_s, cached_s = of(lambda s: s.total_s), of(lambda s: s.total_s, cached)
    build_s = spread(one.total_s for one in built)
    rates = [sample.decode_rate for sample in online if sample.decode_rate is not None]
    return Row(
        method=found.arm.method,
        retention_ratio=found.arm.retention_ratio,
        visual_tokens=of(lambda s: s.visual_tokens).median,
        prompt_tokens=of(lambda s: s.prompt_tokens).median,
        kv_bytes=of(lambda s: s.kv_bytes).median,
        video_decode_s=of(lambda s: s.video_decode_s),
        encode_s=of(lambda s: s.encode_s),
        prune_s=of(lambda s: s.prune_s),
        prompt_s=of(lambda s: s.prompt_s),
        prefill_s=of(lambda s: s.prefill_s),
        prefill_rate=of(lambda s: s.prefill_rate),
        token_decode_s=of(lambda s: s.token_decode_s),
        decode_rate=spread(rates) if rates else None,
        llm_s=of(lambda s: s.llm_s),
        llm_with_tower_s=of(lambda s: s.llm_with_tower_s),
        online_s=online_s,
        read_s=of(lambda s: s.read_s, cached),
        cached_llm_s=of(lambda s: s.llm_s, cached),
        cached_s=cached_s,
        write_s=spread(one.write_s for one in built),
        build_s=build_s,
        bytes_read=of(lambda s: s.bytes_read, cached).median,
        online_peak_bytes=found.online_peak,
        cached_peak_bytes=found.cached_peak,
        break_even=break_even(build_s.median, cached_s.median, online_s.median),
        same_answers=_answers(online) == _answers(cached),
    )


def spread(values: Iterable[float]) -> Spread:
    """Return the median, smallest and largest of the values."""
    listed = list(values)
    return Spread(median(listed), min(listed), max(listed))


def _answers(samples: Sequence[Sample]) -> dict[tuple[str, int, int], tuple[int, ...]]:
    """Return the answer's token ids by (video, question, repeat)."""
    return {(sample.video_id, sample.question, sample.repeat): sample.answer for sample in samples}


def tables(rows: Sequence[Row], title: str, memory: str) -> list[Table]:
    """Lay out three tables: the paper's columns, their parts, and online beside cached; ``memory`` titles the peak."""
    full = rows[0]
    paper = _table(
        f"{title}\nonline, seconds a question: median (lowest to highest); in % the change to full retention",
        *("visual tokens", "E2E s", "LLM s with tower", "LLM s without tower", memory, "KV MiB"),
    )
    parts = _table(
        "parts of it, medians; tokens/s of the prompt, and of the answer after its first token",
        *("read video s", "encode s", "prune s", "prompt s"),
        *("prefill s", "prefill tokens/s", "decode s", "decode tokens/s"),
    )
    modes = _table(
        "from the video (online) and from a cache of its tokens (no vision tower in memory): seconds a question, "
        "seconds to cache a video,\nand from how many questions about a video on caching takes less time",
        *("online s", "cached s", "of it read s", "of it LLM s", "read MB", memory),
        *("build s", "of it write s", "break-even", "same answers"),
    )
    for row in rows:
        name = (method_title(row.method) if row is not full else "Original", f"{row.retention_ratio:.0%}")
        paper.add_row(*name, *_paper_cells(row, full))
        parts.add_row(
            *name,
            *(_seconds(part.median) for part in (row.video_decode_s, row.encode_s, row.prune_s, row.prompt_s)),
            *(_seconds(row.prefill_s.median), f"{row.prefill_rate.median:.0f}"),
            *(_seconds(row.token_decode_s.median), f"{row.decode_rate.median:.1f}" if row.decode_rate else ""),
        )
        modes.add_row(*name, *_mode_cells(row))
    return [paper, parts, modes]


def _paper_cells(row: Row, full: Row) -> Iterator[str]:
    """Yield the paper's columns of a row, with the changes to full retention."""
    yield f"{row.visual_tokens:.0f}"
    yield f"{_wide(row.online_s)}{_change(row.online_s.median, full.online_s.median)}"
    yield f"{_wide(row.llm_with_tower_s)}{_change(row.llm_with_tower_s.median, full.llm_with_tower_s.median)}"
    yield f"{_wide(row.llm_s)}{_change(row.llm_s.median, full.llm_s.median)}"
    yield f"{_gib(row.online_peak_bytes)}{_change(row.online_peak_bytes, full.online_peak_bytes)}"
    yield f"{row.kv_bytes / MIB:.1f}{_change(row.kv_bytes, full.kv_bytes)}"


def _mode_cells(row: Row) -> Iterator[str]:
    """Yield the columns of online beside cached."""
    yield from (_wide(row.online_s), _wide(row.cached_s))
    yield from (_seconds(row.read_s.median), _seconds(row.cached_llm_s.median))
    yield from (f"{row.bytes_read / 1e6:.2f}", _gib(row.cached_peak_bytes))
    yield from (_seconds(row.build_s.median), _seconds(row.write_s.median))
    yield "never" if row.break_even is None else str(row.break_even)
    yield "yes" if row.same_answers else "NO"


def _table(title: str, *columns: str) -> Table:
    """Make an empty table with the columns method, kept and ``columns``."""
    table = Table(title=title, title_justify="left")
    for name in ("method", "kept", *columns):
        table.add_column(name, justify="left" if name == "method" else "right")
    return table


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


def as_record(rows: Sequence[Row], found: Sequence[Found], **more: Json) -> JsonObject:
    """Return the JSON-able document of the benchmark: the machine, the rows and every sample, in seconds and bytes."""

    def listed(one: Found, measured: Sequence[Sample] | Sequence[Built]) -> list[JsonObject]:
        arm: JsonObject = {"method": one.arm.method, "retention_ratio": one.arm.retention_ratio}
        return [{**arm, **asdict(item), "total_s": item.total_s} for item in measured]

    samples = [item for one in found for item in listed(one, [*one.online, *one.cached])]
    built = [item for one in found for item in listed(one, one.built)]
    lines = [{name: _named(value) for name, value in vars(row).items()} for row in rows]
    return {**more, "rows": lines, "samples": samples, "built": built}


def _named(value: Json | Spread) -> Json:
    """Convert a Spread to a dict by field name; return other values as they are."""
    return value._asdict() if isinstance(value, Spread) else value
