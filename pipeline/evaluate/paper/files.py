"""``jobs.evaluate --table NAME --results RESULTS...``: the files of one table or figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.errors import NotResults
from pipeline.evaluate.config import POSITIONS, EvaluateConfig
from pipeline.evaluate.grids import TABLES
from pipeline.evaluate.paper.gathered import BenchmarkResults, at_positions, compared, gather, missing
from pipeline.evaluate.paper.render import latex, markdown, page
from pipeline.evaluate.paper.sheets import sheets
from pipeline.evaluate.statistics.sheets import Sheet
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at


@dataclass(frozen=True)
class PaperFiles:
    """The written files of a paper table: ``sheets``, ``files`` below ``out``, and lines about ``missing`` results."""

    sheets: Sequence[Sheet]
    missing: Sequence[str]
    out: str
    files: Sequence[str]


def lay_out(config: EvaluateConfig) -> PaperFiles:
    """Write the table as Markdown, LaTeX and a page.

    Raises UsageError (nothing was written) and OSError.
    """
    assert config.table is not None  # the config refuses a request without it
    objects = Objects.from_environment(config.s3_endpoint, config.s3_region)
    table, store = TABLES[config.table], store_at(config.out, objects)
    names = [f"{config.table}.{suffix}" for suffix in ("md", "tex", "html")]
    if store.taken() and not any(map(store.exists, names)):
        raise NotResults(f"{store} exists and holds something else than {names[0]}: name another place with --out")
    found = gather(table, config.results, objects, mixed=config.mixed)
    made: list[Sheet] = []
    lacking: list[str] = []
    for positions in POSITIONS[config.positions]:
        chosen = [at_positions(one, positions) for one in found]
        absent = missing(table, chosen)
        results, notes = compared(found[0].model, table, chosen, config.draws, config.seed)
        title = table.title if positions is None else f"{table.title}, {positions} positions"
        made += sheets(replace(table, title=title), results, [*notes, *absent])
        lacking += [line for line in absent if line not in lacking]
    texts = [markdown(made), latex(made), page(table.title, made, _facts(found))]
    store.make()
    for name, text in zip(names, texts, strict=True):
        store.put(name, text.encode())
    return PaperFiles(made, lacking, config.out, names)


def _facts(found: Sequence[BenchmarkResults]) -> list[tuple[str, str]]:
    """Return (name, value) facts about the model and settings behind each benchmark's numbers."""
    model = found[0].model_identity
    facts = [("model", f"{found[0].model}, {model['type']}, {model['weights']}")]
    for one in found:
        frames, protocol = one.identity["num_frames"], one.identity["protocol"]
        asked = len(set(one.scores["question_id"].to_pylist()))
        whose = ", scores from its server, without errors" if one.benchmark.submission else ""
        facts.append((one.benchmark.title, f"{asked:,} questions, {frames} frames, {protocol}{whose}"))
    return facts
