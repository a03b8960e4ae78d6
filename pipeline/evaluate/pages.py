"""Pages of single videos, as ``jobs.inspect --html`` draws them: what each method keeps of a video."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import torch
from rich.console import Console

from gstep import PrunedTokens
from gstep.language import prompt_builder
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import CacheIdentity
from pipeline.cache.reader import HEADER, TokenCache
from pipeline.cache.schema import digest
from pipeline.errors import printable
from pipeline.evaluate.report.cards import Links
from pipeline.evaluate.report.disagreements import answers_of, disagreements
from pipeline.evaluate.request import EvaluateRequest
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm
from pipeline.generate.late_pruning import LateAsked, LatePruning, late_pruning
from pipeline.inspect.page import draw_page
from pipeline.inspect.thumbnails import source_pictures
from pipeline.rows import VideoRow
from pipeline.storage.stores import store_at

PAGES = "pages"


def video_pages(request: EvaluateRequest, scores: pa.Table, arms: Sequence[Arm], console: Console) -> dict[str, Links]:
    """Write a page for each method that looks at the video alone, of the videos on which methods disagree most.

    A page shows a nested method at all its ratios, another one at the largest. Pages that are there stay; where the
    cache is gone no new ones come, and what goes wrong with one costs that page alone. Returns video_id -> (method,
    address relative to the results).
    """
    videos = most_disputed(scores, arms, request.config.pages)
    largest: dict[str, LateAsked] = {}
    for one in request.grid.values():
        if one is not None:  # a method keeps the same tokens at all positions; its largest ratio comes first
            anywhere = replace(one, positions=None)
            largest.setdefault(anywhere.method_label, anywhere)
    store = store_at(request.cache, request.objects)
    cache = TokenCache(request.cache, store=store) if videos and store.exists(HEADER) else None
    links: dict[str, Links] = {}
    for video_id in videos:
        names = {label: page_name(video_id, one) for label, one in largest.items()}
        missing = {label: name for label, name in names.items() if not request.store.exists(name)}
        if cache is not None and missing:
            try:
                for label, html in _drawn(request, cache, video_id, {label: largest[label] for label in missing}):
                    request.store.put(names[label], html.encode())
            except Exception as error:  # noqa: BLE001 - a method's own code runs here, and the results are worth more
                console.print(f"note: no page of {video_id}: {printable(repr(error))}", highlight=False, markup=False)
        there = [(label, name) for label, name in names.items() if request.store.exists(name)]
        if there:
            links[video_id] = there
    return links


def most_disputed(scores: pa.Table, arms: Sequence[Arm], most: int) -> list[str]:
    """Return up to ``most`` videos, those on whose questions the arms' answers differ most."""
    if not most:
        return []
    answers = answers_of(scores, [ORIGINAL, *(arm for arm in arms if arm != ORIGINAL)])
    video_of = dict(zip(scores["question_id"].to_pylist(), scores["video_id"].to_pylist(), strict=True))
    disputed = (answers.questions[one.question] for one in disagreements(answers).every)
    counts = Counter(video_of[question] for question in disputed)
    return [video for video, _ in counts.most_common(most)]


def page_name(video_id: str, one: LateAsked) -> str:
    """Return the name of a video's page under a method at its largest ratio; ids may hold any character."""
    kind = digest(video_id.encode()).partition(":")[2][:12]
    return f"{PAGES}/{kind}-{re.sub(r'[^A-Za-z0-9=.+-]+', '-', one.label)}.html"


def _drawn(
    request: EvaluateRequest, cache: TokenCache, video_id: str, asked: Mapping[str, LateAsked]
) -> Iterator[tuple[str, str]]:
    """Write the page of one video under each method that selects from the video alone; yield (label, page)."""
    held, builder = cache.identity, prompt_builder(request.source)
    lates = {label: late_pruning(one, held, request.source, builder) for label, one in asked.items()}
    lates = {label: late for label, late in lates.items() if late.pruner.cacheable}
    columns = tuple(dict.fromkeys(column for late in lates.values() for _, column in late.evidence))
    if video_id not in cache:  # the failed video's questions say why
        return
    whole = cache.get(video_id, evidence=columns)
    visual = whole.visual
    pictures = source_pictures(whole.metadata, held["sampling"], request.objects)
    for label, late in lates.items():
        video = chosen_video(whole, late.select(visual, "cpu"))
        yield label, draw_page(video, described(held, late), pictures).html


def chosen_video(whole: CachedVideo, pruned: PrunedTokens) -> CachedVideo:
    """Return a fully read video reduced to the kept tokens, as a cache of that method would return it."""
    order, per_frame = pruned.selection_order(), whole.metadata["tokens_per_frame"]
    index = pruned.index[order]
    counts = torch.bincount(index // per_frame, minlength=whole.metadata["n_frames"])
    temporal = pruned.temporal_density
    row: VideoRow = {
        **whole.metadata,
        "retention_ratio": pruned.retention_ratio,
        "nested": pruned.nested,
        "n_tokens": len(index),
        "kept_per_frame": counts.tolist(),
        "temporal_density": None if temporal is None else temporal.tolist(),
    }
    return replace(whole, index=index, metadata=row)


def described(held: CacheIdentity, late: LatePruning) -> CacheIdentity:
    """Return the identity of a cache that would store only the tokens that the method keeps."""
    pruner = late.describe()
    pruner.pop("text_tower", None)
    return {**held, "pruner": pruner, "retention_ratio": late.retention_ratio}
