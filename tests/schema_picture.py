"""Draw the schema of a cache: ``python -m tests.schema_picture > pipeline/cache/schema.svg``; a test compares them."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

import pyarrow as pa

from pipeline.cache.schema import VIDEO_SCHEMA, token_schema

#: The columns of the videos table by what they are for; together they are all columns.
GROUPS = {
    "which row of a video counts": (
        "video_id", "status", "attempts", "rewritten", "tie_break", "earlier_attempts", "clip_key", "id_high", "id_low",
    ),
    "where its tokens are": (
        "token_shard", "first_row_group", "row_counts", "footer_hash", "checksum", "n_tokens", "n_total", "hidden_size",
        "retention_ratio", "nested", "content_name", "token_codec", "token_block",
    ),
    "the source": (
        "uri", "start_s", "end_s", "source_size", "source_hash", "codec", "fps", "duration_s", "source_frames",
        "source_width", "source_height", "color_transfer", "sample_aspect_ratio", "manifest", "source_shard",
        "source_offset",
    ),
    "what the encoder saw": (
        "n_frames", "tokens_per_frame", "frame_indices", "timestamps", "clip_frames", "clip_fps", "n_repeated", "width",
        "height", "kept_per_frame", "temporal_density", "model_extra", "uneven_positions", "shared_positions",
    ),
    "a failure": ("error_class", "error_stage", "error_message", "error_signal", "retryable"),
    "how it was made": (
        "run_id", "runtime", "backend", "backend_version", "backend_note", "decode_warnings", "decode_s", "encode_s",
        "prune_s", "write_s", "gate", "tower_hash",
    ),
}  # fmt: skip
_SHORT = {"string": "text", "double": "float64", "float": "float32"}
_LINE, _WIDTH = 17, 960
_STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1b1d21; }
.title { font-weight: 700; font-size: 14px; }
.group { font-family: system-ui, 'DejaVu Sans', sans-serif; font-weight: 600; fill: #2f6fbd; }
.kind, .note { fill: #62666e; }
.note { font-family: system-ui, 'DejaVu Sans', sans-serif; }
.card { fill: #fff; stroke: #c9c9c4; }
.key { fill: #a86500; font-weight: 700; }
.arrow { fill: none; stroke: #e08a00; stroke-width: 2; marker-end: url(#head); }
"""


def kind_of(field: pa.Field) -> str:
    """Return a short name of a column's type: int32, text, bytes, [int64]."""
    if pa.types.is_list(field.type):
        return f"[{_SHORT.get(str(field.type.value_type), str(field.type.value_type))}]"
    if pa.types.is_fixed_size_binary(field.type):
        return "2·D bytes"
    return _SHORT.get(str(field.type), str(field.type))


class Drawing:
    """Lines of text and boxes of an SVG."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def text(self, x: int, y: int, words: str, kind: str = "") -> None:
        """Write words at a place."""
        self.parts.append(
            f'<text x="{x}" y="{y}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'
        )

    def card(self, x: int, y: int, width: int, height: int, title: str, note: str) -> None:
        """Draw a box with a title and a note."""
        self.parts.append(f'<rect class="card" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>')
        self.text(x + 14, y + 24, title, "title")
        self.text(x + 14, y + 42, note, "note")

    def columns(self, x: int, y: int, fields: Sequence[pa.Field], wide: int, keys: Sequence[str] = ()) -> int:
        """Write a column a line; return the height below the last."""
        for number, field in enumerate(fields):
            self.text(x, y + number * _LINE, field.name, "key" if field.name in keys else "")
            self.text(x + wide, y + number * _LINE, kind_of(field), "kind")
        return y + len(fields) * _LINE


def picture() -> str:
    """Draw the four parts of a cache and how they name each other."""
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(VIDEO_SCHEMA.names)
    draw = Drawing()
    draw.card(10, 10, 300, 92, "cache.json", "written once, with the first row")
    draw.text(24, 74, "schema_version  identity  newline")
    draw.text(24, 91, "what every row was made with", "note")
    draw.card(330, 10, 620, 92, "runs/<run_id>.json", "provenance of a run; no row depends on it")
    draw.text(344, 74, "versions  hosts  config  plan  summary  committed")
    longest = max(sum(2 + len(names) for names in list(GROUPS.values())[place::3]) for place in range(3))
    bottom = 190 + _LINE * longest
    draw.card(
        10,
        122,
        940,
        bottom - 122,
        "videos/<file>.parquet",
        "a row a video, failed and removed ones too; a rule says which row counts",
    )
    below = [190, 190, 190]
    for number, (title, names) in enumerate(GROUPS.items()):
        x, y, keys = 24 + 316 * (number % 3), below[number % 3], ("video_id", "token_shard", "first_row_group")
        draw.text(x, y, title, "group")
        below[number % 3] = 26 + draw.columns(x, y + 18, [VIDEO_SCHEMA.field(name) for name in names], 160, keys)
    top = bottom + 44
    fields = [*token_schema(1)]
    height = 64 + (len(fields) + 2) * _LINE
    draw.card(
        10,
        top,
        940,
        height,
        "tokens/<shard>.parquet",
        "a row a token, a video's rows in order of selection; row groups end at 10, 15, 20, 25, 50 %",
    )
    for number, field in enumerate(fields):
        y = top + 68 + number * _LINE
        draw.text(24, y, field.name, "key" if field.name == "video_id" else "")
        draw.text(184, y, kind_of(field), "kind")
        draw.text(300, y, field.metadata[b"meaning"].decode(), "note")
    y = top + 68 + len(fields) * _LINE
    draw.text(24, y, "deepstack_0 ...")
    draw.text(184, y, "2·D bytes", "kind")
    draw.text(300, y, "of models that have them; with a codec also token_scale, token_kept", "note")
    draw.text(24, y + _LINE, "<evidence>")
    draw.text(184, y + _LINE, "bytes", "kind")
    draw.text(300, y + _LINE, "of --evidence, a column each", "note")
    draw.parts.append(f'<path class="arrow" d="M326 204H318V{top - 3}"/>')
    draw.text(330, bottom + 26, "token_shard, first_row_group and row_counts lead to a video's tokens", "note")
    size = f'width="{_WIDTH}" height="{top + height + 10}" viewBox="0 0 {_WIDTH} {top + height + 10}"'
    tip = '<path d="M0 0L6 3L0 6Z" fill="#e08a00"/>'
    head = f'<marker id="head" markerWidth="8" markerHeight="8" refX="5" refY="3" orient="auto">{tip}</marker>'
    ground = '<rect width="100%" height="100%" fill="#f6f6f4"/>'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<style>{_STYLE}</style>",
        f"<defs>{head}</defs>",
        ground,
    ]
    return "\n".join([*lines, *draw.parts, "</svg>", ""])


if __name__ == "__main__":
    print(picture(), end="")
