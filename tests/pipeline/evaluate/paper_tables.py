"""Table 1 of the GSTEP paper, number by number: ``*`` is its bold (best), ``_`` its underline (second best)."""

from __future__ import annotations

from typing import NamedTuple


class PaperRow(NamedTuple):
    """A row: its method as this package names it, its numbers as printed, and their marks."""

    method: str
    ratio: float
    numbers: tuple[str, ...]
    marks: tuple[str, ...]


#: The number columns; Rel. is last.
COLUMNS = ("Short", "Medium", "Long", "VideoMME", "LongVideoBench", "MLVU", "MVBench", "EgoSchema", "Rel.")

#: Full retention; then a block a retention ratio.
TABLE = {
    1.0: "Original 70.3 56.6 48.8 58.6 56.4 63.0 56.9 60.4 100.0",
    0.25: """
        FastV 65.0 53.8 47.0 55.3 53.3 59.6 55.5 57.5 95.2
        FastVID _69.9 _56.3 47.4 57.9 _56.3 61.3 56.5 59.5 98.7
        CDPruner 63.2 54.8 47.1 55.0 54.3 61.2 54.7 58.3 96.0
        VisionZip 61.6 53.4 47.2 54.1 51.2 58.5 53.7 *60.3 94.0
        VidCom2 69.8 *56.4 _49.4 _58.6 54.9 _62.5 *57.2 _59.7 _99.2
        GSTEP *70.0 *56.4 *50.2 *58.9 *57.2 *63.3 _56.9 59.5 *100.2
    """,
    0.2: """
        FastV 60.8 51.0 47.2 53.0 50.0 57.2 51.9 56.6 91.0
        FastVID _69.3 *56.7 47.7 57.9 _56.7 61.1 _56.3 _59.5 _98.8
        CDPruner 62.2 52.7 46.9 53.9 53.3 59.7 53.9 57.2 94.1
        VisionZip 60.8 51.0 47.1 53.0 50.0 57.1 53.0 *59.8 92.4
        VidCom2 *69.4 _56.4 _48.0 _58.0 53.7 _61.9 *56.6 *59.8 98.2
        GSTEP 68.9 _56.4 *49.8 *58.4 *56.9 *63.4 *56.6 59.1 *99.7
    """,
    0.15: """
        FastV 58.6 50.8 47.1 52.1 47.7 56.6 50.5 55.6 88.8
        FastVID *69.7 *55.8 47.7 *57.7 _56.5 _60.9 _56.0 58.8 _98.2
        CDPruner 61.9 52.2 45.8 53.3 52.4 58.8 52.9 57.0 92.9
        VisionZip 50.4 45.8 41.8 46.0 46.9 54.4 50.3 *59.8 87.1
        VidCom2 65.8 _54.8 _48.1 56.2 52.0 58.9 54.3 _59.2 95.0
        GSTEP _69.0 _54.8 *49.0 _57.6 *57.0 *63.5 *57.0 58.9 *99.6
    """,
    0.1: """
        FastV 54.1 49.8 44.6 49.4 46.8 55.6 49.8 54.6 86.7
        FastVID _67.4 *56.0 *48.6 *57.2 *55.6 _60.5 _55.9 *58.6 _97.5
        CDPruner 59.4 51.7 45.4 52.2 49.7 57.7 51.1 55.8 90.2
        VisionZip 50.4 45.8 41.8 46.0 43.5 51.5 44.4 _58.0 82.3
        VidCom2 61.6 52.0 _47.7 53.7 50.3 58.1 52.6 57.5 92.1
        GSTEP *67.8 _55.3 47.1 _56.7 _55.2 *62.1 *56.1 *58.6 *97.8
    """,
}


def paper_rows() -> list[PaperRow]:
    """Return the 25 rows of the table, full retention first, whose method is ``none``."""
    return [_row(ratio, line) for ratio, block in TABLE.items() for line in block.strip().splitlines()]


def _row(ratio: float, line: str) -> PaperRow:
    name, *numbers = line.split()
    mark = {"*": "best", "_": "second"}
    return PaperRow(
        "none" if name == "Original" else name.lower(),
        ratio,
        tuple(number.lstrip("*_") for number in numbers),
        tuple(mark.get(number[0], "") for number in numbers),
    )
