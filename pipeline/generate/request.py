"""A request to answer questions, checked against questions, cache, model and answers before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from gstep.backbones import ModelSource
from gstep.language import Decoding, PromptBuilder, prompt_builder
from pipeline.cache.header import CacheHeader, CacheIdentity, ModelIdentity, differences
from pipeline.cache.live_rows import INDEX_COLUMNS, read_live
from pipeline.cache.method import declared_method
from pipeline.cache.reader import TokenOrder, read_header, rows_wanted
from pipeline.errors import IdentityMismatch, NotAnswers, UsageError
from pipeline.execution.request import check_out, new_run_id, refusing, store_refusing
from pipeline.generate.answers import HEADER, AnswersTable, read_answers_header
from pipeline.generate.config import GenerateConfig
from pipeline.generate.late_pruning import LatePruning, late_pruning
from pipeline.generate.questions import Way, read_questions
from pipeline.rows import VideoRecord, without_nulls
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at

# What is asked of the index of the cache, beside what TokenCache needs of it.
LIVE_COLUMNS = (
    *INDEX_COLUMNS,
    *("error_message", "n_tokens", "n_total", "n_frames", "tokens_per_frame", "hidden_size"),
    *("retention_ratio", "nested"),
)


@dataclass(frozen=True)
class GenerateRequest:
    """A request that was checked: everything a run needs, before anything was started.

    Attributes:
        held: the identity of the cache.
        live: live rows of those videos of the cache that are asked about, LIVE_COLUMNS; and ``videos`` by their id.
        builder: makes prompts.
        source: the model, the one that the cache was made with.
        questions: QUESTION_SCHEMA.
        way: how questions are answered that do not say otherwise.
        store: where the answers go.
        late: a method that prunes once a question is known.
        order: of the kept tokens in a prompt, as TokenCache.get takes it.
    """

    config: GenerateConfig
    run_id: str
    objects: Objects
    cache: Store
    held: CacheIdentity
    live: pa.Table
    source: ModelSource
    builder: PromptBuilder
    questions: pa.Table
    way: Way
    store: Store
    late: LatePruning | None = None
    order: TokenOrder = "index"

    @cached_property
    def videos(self) -> dict[str, VideoRecord]:
        return {row["video_id"]: without_nulls(row, VideoRecord) for row in self.live.to_pylist()}

    @property
    def identity(self) -> dict[str, Any]:
        """What all answers share, JSON-able; others are refused."""
        stored = self.held["retention_ratio"]
        return {
            "cache": self.held,
            "model": {"type": self.source.model_type, "weights": self.source.identity},
            "retention_ratio": stored if self.config.retention_ratio is None else self.config.retention_ratio,
            "prompt": {**self.builder.policy.describe(), "order": self.order},
            "decoding": self.way.describe(),
            **({} if self.late is None else {"pruner": self.late.describe()}),
        }

    @property
    def read_ratio(self) -> float | None:
        """The share of tokens that is read from the cache; None is all."""
        return None if self.late else self.config.retention_ratio

    def n_visual(self, videos: Sequence[VideoRecord]) -> int:
        """Visual tokens that go into a prompt on these rows of the videos table, at most."""
        late, hidden = self.late, self.builder.hidden_size
        if late is not None:
            kept = sum(late.at_most(row["n_frames"], row["tokens_per_frame"], hidden) for row in videos)
        else:
            kept = sum(rows_wanted(row, self.read_ratio) for row in videos)
        return kept + (len(videos) if self.builder.needs_newline else 0)


def prepare(config: GenerateConfig, console: Console) -> GenerateRequest:
    """Check the whole request. Raises UsageError, and CorruptShard where the cache was damaged; starts nothing."""
    objects = Objects.from_environment(config.s3_endpoint, config.s3_region)
    cache, store = store_at(config.cache, objects), store_at(config.out, objects)
    check_out(store)
    way = _way(config)
    assert config.questions  # the config refuses a request without
    with store_refusing():
        header = read_header(cache)
        questions = read_questions(config.questions, way, objects, config.limit)
        live = _asked_about(questions, read_live(cache, LIVE_COLUMNS))
        _check_free(store)
    held = header["identity"]
    source, builder = _resolved(config, cache, held)
    _check_tokens(cache, header, live, builder)
    with refusing():
        late = late_pruning(config, held, source, builder)
    _check_ratio(None if late else config.retention_ratio, held["retention_ratio"], live)
    request = GenerateRequest(
        config=config,
        run_id=new_run_id(),
        objects=objects,
        cache=cache,
        held=held,
        live=live,
        source=source,
        builder=builder,
        questions=questions,
        way=way,
        store=store,
        late=late,
        order=_order(config, held),
    )
    _check_context(request, console)
    with store_refusing():
        match_answers(request)
    return request


def _resolved(config: GenerateConfig, cache: Store, held: CacheIdentity) -> tuple[ModelSource, PromptBuilder]:
    """The model, which must be the cache's, and what makes prompts for it."""
    with refusing():
        source = ModelSource.resolve(*_model(config, held["model"]["weights"]))
        _check_model(cache, held["model"], source)
        positions = None if config.positions == "auto" else config.positions
        return source, prompt_builder(source, positions, config.rule)


def _check_free(store: Store) -> None:
    """Refuse a place that holds something else."""
    if not store.exists(HEADER) and store.taken():
        raise NotAnswers(f"{store} exists and holds no answers (it has no {HEADER}): name an empty place with --out")


def _way(config: GenerateConfig) -> Way:
    """How questions are answered that do not say otherwise."""
    with refusing():
        decoding = Decoding(config.max_new_tokens, config.temperature, config.top_p, config.top_k, config.seed)
    return Way(decoding, config.choices, config.system)


def match_answers(request: GenerateRequest) -> None:
    """Refuse answers of other settings. A place without a single answer binds nothing."""
    if not request.store.exists(HEADER):
        return
    held = read_answers_header(request.store)["identity"]
    if not AnswersTable(request.store).names():
        return
    wrong = differences(held, request.identity, has="the answers have")
    if wrong:
        raise IdentityMismatch(
            f"{request.store} holds answers made with other settings, and one place holds one kind:\n  "
            + "\n  ".join(wrong)
            + "\nUse the settings of the answers, or another --out."
        )


def _order(config: GenerateConfig, held: CacheIdentity) -> TokenOrder:
    declared = declared_method(held)
    own = declared is not None and declared.reorders
    if config.order == "own" and not own:
        raise UsageError(
            f"--order own: {held['pruner']['method']}, which this cache was pruned with, has no order of its own in a "
            "prompt"
        )
    return "selection" if own and config.order != "index" else "index"


def _asked_about(questions: pa.Table, live: pa.Table) -> pa.Table:
    ids = pc.unique(pc.list_flatten(questions["video_ids"]))
    return live.filter(pc.is_in(live["video_id"], value_set=ids))


def _model(config: GenerateConfig, weights: str) -> tuple[str, str | None]:
    """(model, revision): as asked for, else as the cache's identity tells."""
    kind, _, rest = weights.partition(":")
    hub_id, _, sha = rest.rpartition("@") if kind == "hub" else ("", "", "")
    if config.model is not None:
        # The weights that the cache was made with, wherever the branch is now.
        return config.model, config.revision or (sha if config.model == hub_id else None)
    if kind == "hub":
        return hub_id, config.revision or sha
    if kind.startswith("tiny"):
        return kind, config.revision
    raise UsageError(f"--model is missing: the cache was made with a folder ({weights}), and does not say where it is")


def _check_model(cache: Store, held: ModelIdentity, source: ModelSource) -> None:
    if (held["type"], held["weights"]) != (source.model_type, source.identity):
        raise IdentityMismatch(
            f"{cache} was made with the weights {held['weights']} ({held['type']}), --model {source.name} has "
            f"{source.identity} ({source.model_type}): an LLM understands the tokens of its own vision encoder only"
        )


def _check_tokens(cache: Store, header: CacheHeader, live: pa.Table, builder: PromptBuilder) -> None:
    """Whether the cached tokens are of the shape that the model takes."""
    again = "prune into another --out with the same model"
    levels = header.get("deepstack_levels", 0)  # caches made before there were any do not say
    if levels != builder.deepstack_levels:
        raise UsageError(
            f"{cache}: it holds {levels} deepstack levels, the model takes {builder.deepstack_levels}: {again}"
        )
    if builder.needs_newline and header.get("newline") is None:
        raise UsageError(f"{cache}: it has no newline row, which this model puts after a video: {again}")
    widths = pc.unique(live.filter(pc.equal(live["status"], "ok"))["hidden_size"]).to_pylist()
    if wrong := [width for width in widths if width != builder.hidden_size]:
        raise UsageError(f"{cache}: its tokens have {wrong[0]} values, the model takes {builder.hidden_size}: {again}")


def _check_ratio(ratio: float | None, stored: float, live: pa.Table) -> None:
    """Whether the cache serves the ratio: it is not larger, and smaller only of a method with an order."""
    if ratio is None:
        return
    if ratio > stored + 1e-9:
        raise UsageError(f"--retention-ratio {ratio}: the cache stores {stored}; prune into another --out for more")
    with refusing():
        for row in live.filter(pc.equal(live["status"], "ok")).to_pylist():
            rows_wanted(row, ratio)


def _check_context(request: GenerateRequest, console: Console) -> None:
    """Say which prompts cannot fit by their visual tokens alone; refuse where none can."""
    videos = request.videos
    sizes = [
        request.n_visual([videos[video_id] for video_id in ids])
        for ids in request.questions["video_ids"].to_pylist()
        if all(answerable(videos.get(video_id)) for video_id in ids)
    ]
    context = request.builder.context_length
    long = [size for size in sizes if size > context]
    if not long:
        return
    what = f"{len(long)} of {len(sizes)} prompts have up to {max(long)} visual tokens, and the model takes {context}"
    if len(long) == len(sizes):
        raise UsageError(f"{what} tokens with the answer: lower --retention-ratio")
    console.print(f"note: {what}: they become rows of class prompt-too-long", highlight=False, markup=False)


def answerable(row: VideoRecord | None) -> bool:
    """Whether a video's live row has tokens."""
    return row is not None and row["status"] == "ok"
