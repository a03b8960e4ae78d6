"""``pipeline.compare``: the tokens that several methods keep of one video, all from one encoding of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gstep.backbones import ModelSource, family_class, family_of
from gstep.evidence import HEAD_SOURCES, make_label
from gstep.pruners.base import Pruner
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import HEADER, CacheIdentity, describe_method, list_differences
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError, VideoFault, convert_usage_errors
from pipeline.generate.late_pruning import find_evidence_columns, is_whole, make_visual_tokens
from pipeline.generate.model import choose_family, choose_model
from pipeline.inputs.listings import VIDEO_SUFFIXES, find_suffix
from pipeline.inputs.manifest import sort_roots
from pipeline.inputs.named_videos import Roots
from pipeline.inspect.comparison import Comparison, MethodSelection
from pipeline.inspect.page import get_grid
from pipeline.inspect.selecting import (
    RequestedSelection,
    compare_frames,
    list_requested_selections,
    plan_encoding,
    select_with_methods,
)
from pipeline.inspect.thumbnails import make_source_pictures
from pipeline.options import check_ratio, make_config
from pipeline.prune.config import ENCODING_OPTIONS, PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_again import decode_again, read_run_config
from pipeline.prune.one_video import decode_file
from pipeline.prune.recipe import Recipe
from pipeline.rows import VIDEO_COLUMNS, Json, VideoRow
from pipeline.runner.run_record import RUNS, find_newest_record
from pipeline.storage.arrow import SCHEMES
from pipeline.storage.s3 import Objects, is_s3
from pipeline.storage.stores import store_at
from pipeline.video.sandbox import InThisProcess

#: The options among ENCODING_OPTIONS that apply to a video of a cache, whose frames, sizes and precision are fixed.
CACHE_OPTIONS = frozenset(
    {"model", "revision", "family", "siglip", "device", "attn", "seed", "fetch_memory"}
    | {"s3_endpoint", "s3_requester_pays"}
)
_DEFAULT_METHODS = ("gstep",)  # method and ratio are the defaults of jobs.prune
_DEFAULT_RATIO = 0.25


def compare(
    video: str | os.PathLike[str] | TokenCache,
    video_id: str | None = None,
    *,
    methods: str | Pruner | Sequence[str | Pruner] | None = None,
    retention_ratios: float | Sequence[float] | None = None,
    start_s: float | None = None,
    end_s: float | None = None,
    video_roots: Sequence[str] = (),
    **options: Any,
) -> Comparison:
    """Show which tokens of one video several methods keep; a notebook displays the result as a page of its frames.

    >>> pipeline.compare("bikes.mp4", methods=["gstep", "vidcom2", "random,seed=1"], retention_ratios=[0.25, 0.10])
    >>> pipeline.compare("cache", "bikes.mp4", methods=["gstep", "random"], video_roots=["videos"]).save("page.html")
    >>> pipeline.compare("cache", "bikes.mp4")  # what the cache holds

    All selections come from one encoding of the video, and are those that ``python -m jobs.prune`` would cache. For a
    video of a cache, stored selections are shown if no others are requested. The methods select from the stored tokens
    if the cache holds all tokens in bfloat16 and the evidence that the methods need. Otherwise the source is encoded
    again with the model and the frames of the cache.

    Args:
        video: a video file, local or on S3, which is decoded in this process; or a cache.
        video_id: the video of the cache. For a file: its name in the result, by default the file's name.
        methods: one or several, each ``METHOD`` or ``METHOD,NAME=VALUE,...`` as for ``python -m jobs.evaluate
            --method``, such as ``random,seed=0..2``; or a Pruner object. None and [] are the method of the cache, or
            gstep for a file.
        retention_ratios: one or several shares of the tokens to keep. None and [] are the ratio of the cache, or 0.25
            for a file and for methods on a cache of all tokens.
        start_s, end_s: the clip of a file, in seconds.
        video_roots: folders and prefixes below which the sources that a cache names may be read.
        options: the options of ``python -m jobs.prune --help-all`` about one video: ``model``, ``num_frames``, ``fps``,
            ``device`` and so on. With a cache, options other than CACHE_OPTIONS are refused.

    Raises:
        UsageError: an option, a method or a ratio cannot be used, or a cache holds too few tokens for the methods and
            its source cannot be encoded again; the message has the remedy.
        VideoFault: the video cannot be read, or a method cannot prune it.
        UnknownVideo: the cache has no tokens of the video.
        RatioNotCached: without methods, a ratio that the cache does not serve.
        MethodFails: a user method fails for every video.
    """
    config = make_config(PruneConfig, "compare", options, ENCODING_OPTIONS)
    methods = [methods] if isinstance(methods, str | Pruner) else methods
    ratio_values = [retention_ratios] if isinstance(retention_ratios, float | int) else list(retention_ratios or ())
    ratios = [float(ratio) for ratio in ratio_values]
    for ratio in ratios:
        check_ratio("retention_ratio", ratio)
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    cache = _open_cache(video, objects)
    if cache is None:
        assert not isinstance(video, TokenCache)
        if video_roots:
            raise UsageError(f"{os.fspath(video)} is not a cache: --video-root applies only to the sources of a cache")
        with convert_usage_errors():
            source = ModelSource.resolve(config.model, config.revision, quantized=True, family=config.family)
        methods, ratios = methods or _DEFAULT_METHODS, ratios or [_DEFAULT_RATIO]
        wanted = list_requested_selections(methods, ratios, config.seed, family_of(source).variant)
        recipe = plan_encoding(config, source, wanted, objects)
        decoder = VideoDecoder(recipe.make_decode_setup(), InThisProcess())
        record, frames = decode_file(decoder, os.fspath(video), start_s, end_s)
        row: VideoRow = {**dict.fromkeys(VIDEO_COLUMNS), **record, "video_id": video_id or Path(video).name}  # type: ignore[typeddict-item]
        return compare_frames(recipe, config.device, config.dtype, row, frames, wanted)
    if video_id is None:
        raise UsageError(f"{cache.store} is a cache: name one of its videos")
    if misplaced := sorted(options.keys() - CACHE_OPTIONS):
        raise UsageError(
            f"{', '.join(misplaced)}: a video of a cache has the frames and the precision of the cache; name the video "
            "file instead of the cache to choose them"
        )
    if (start_s, end_s) != (None, None):
        raise UsageError("start_s and end_s: a video of a cache is the clip that was cached")
    roots = sort_roots(video_roots)
    return CachedComparison(cache, video_id, config, objects, roots, "model" in options).compare(methods, ratios)


def _open_cache(video: str | os.PathLike[str] | TokenCache, objects: Objects) -> TokenCache | None:
    """Return the cache that ``video`` is or names; None for a video file, and for a location without a cache.

    An S3 address with the suffix of a video is a file; any other address of a store is a prefix.
    """
    if isinstance(video, TokenCache):
        return video
    text = os.fspath(video)
    is_prefix = text.startswith((*SCHEMES, "file:///")) or (is_s3(text) and find_suffix(text) not in VIDEO_SUFFIXES)
    if not (is_prefix or Path(text).is_dir()):
        return None
    store = store_at(text, objects)
    return TokenCache(text, store=store) if store.exists(HEADER) else None


@dataclass(frozen=True)
class CachedComparison:
    """A comparison to make on a video of a cache.

    Attributes:
        config: the options of the call; those that the cache determines are ignored.
        has_model: True if the call names the model.
    """

    cache: TokenCache
    video_id: str
    config: PruneConfig
    objects: Objects
    roots: Roots
    has_model: bool

    def compare(self, methods: Sequence[str | Pruner] | None, ratios: Sequence[float]) -> Comparison:
        """Compare the methods on the stored tokens if they suffice, otherwise on the source, encoded again.

        Args:
            methods: None or empty for the stored selection.
            ratios: empty for the stored ratio; with methods on a cache of all tokens, for 0.25.

        Raises:
            UsageError: a method cannot be used, or the source is needed and cannot be decoded.
            VideoFault: the source cannot be encoded, or a method cannot prune the video.
            RatioNotCached: the cache does not serve a stored ratio.
        """
        cache = self.cache
        identity = self.cache.identity
        stored_ratio = self.cache.retention_ratio
        if not methods:
            own = identity["pruner"]
            settings = {**own["params"], **({"seed": own["seed"]} if "seed" in own else {})}
            return self._show_stored({own["method"]: settings}, ratios or [stored_ratio])
        ratios = ratios or [stored_ratio if stored_ratio < 1 else _DEFAULT_RATIO]
        family = choose_family(identity["model"], self.config.family) or identity["model"]["type"]
        with convert_usage_errors():
            kind = family_class(family)
        wanted = list_requested_selections(methods, ratios, self.config.seed, kind.variant)
        if all(is_stored(identity, row) for row in wanted):
            return self._show_stored(
                {row.label: row.settings for row in wanted}, [row.retention_ratio for row in wanted]
            )
        lacking, columns = _explain_insufficient_tokens(cache, wanted, family)
        if not lacking:
            return self._compare_tokens(wanted, columns)
        try:
            return self._encode_again(wanted, lacking)
        except VideoFault as fault:
            if fault.stage != "decode":
                raise
            needy = dict.fromkeys(row.label.partition(",")[0] for row in wanted if row.pruner.sources)
            evidence = f" --evidence {','.join(needy)}" if needy else ""
            raise UsageError(
                f"{lacking}; its source cannot be encoded again: {fault.message}. Where the source stays away, compare "
                f"on a cache of all tokens, by python -m jobs.prune --pruner none{evidence}"
            ) from fault

    def _show_stored(self, settings: Mapping[str, Mapping[str, Json]], ratios: Sequence[float]) -> Comparison:
        """Return the selections that the cache stores at these ratios, the largest first, once for each label."""
        selections = {}
        for ratio in sorted(set(ratios), reverse=True):
            video = self.cache.get(self.video_id, ratio)
            row = video.metadata
            for label, values in settings.items():
                counts = row["n_total"], row["tokens_per_frame"]
                selections[label, ratio] = MethodSelection(label, ratio, video.index, video.merged, *counts, values)
        return self._make_comparison(selections, row, f"The selections are those that {self.cache.store} stores.")

    def _compare_tokens(self, wanted: Sequence[RequestedSelection], columns: Mapping[str, str]) -> Comparison:
        """Compare the methods on the stored tokens, which are all tokens, on the GPU if there is one."""
        video = self.cache.get(self.video_id, evidence=tuple(columns.values()))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        visual = make_visual_tokens(video.visual, columns.items(), device)
        origin = f"The methods selected from the tokens that {self.cache.store} stores, which are all tokens."
        return self._make_comparison(select_with_methods(wanted, visual), video.metadata, origin)

    def _make_comparison(
        self, selections: Mapping[tuple[str, float], MethodSelection], row: VideoRow, origin: str
    ) -> Comparison:
        """Make the comparison, with pictures if the source can be decoded again."""
        identity = self.cache.identity
        pictures = make_source_pictures(row, identity["sampling"], self.objects, self.roots)
        return Comparison(
            self.video_id, selections, row, get_grid(row), identity["model"], identity["sampling"], origin, pictures
        )

    def _encode_again(self, wanted: Sequence[RequestedSelection], lacking: str) -> Comparison:
        """Encode the source again as the cache's newest run did, and compare the methods on all tokens.

        The result's ``origin`` also compares the new selection of the cache's method with the stored one.

        Raises:
            UsageError: no record tells the settings, or the model is not the cache's or lacks needed evidence.
            UnknownVideo: the cache has no tokens of the video.
            VideoFault: the source cannot be decoded (stage "decode"), encoded or pruned.
        """
        store = self.cache.store
        identity = self.cache.identity
        row = self.cache.metadata(self.video_id)
        if row["status"] != "ok":
            self.cache.get(self.video_id)  # raises the error of a video without tokens
        run = find_newest_record(store)
        if run is None:
            raise UsageError(
                f"{lacking}; and no record in {store}/{RUNS} says how its videos were encoded: compare on the video "
                "file instead of the cache"
            )
        run_config = read_run_config(self.cache, run, self.config.model if self.has_model else None)
        model, revision = choose_model(run_config.model, self.config.revision, identity["model"]["weights"])
        needs_head = any(HEAD_SOURCES & {*row.pruner.sources.values()} for row in wanted)
        config = replace(
            run_config,
            model=model,
            revision=revision,
            family=choose_family(identity["model"], self.config.family),
            siglip=self.config.siglip or (run_config.siglip if needs_head else None),
            **{name: getattr(self.config, name) for name in ("device", "attn", "fetch_memory")},
        )
        with convert_usage_errors():
            source = ModelSource.resolve(config.model, config.revision, quantized=True, family=config.family)
        recipe = plan_encoding(config, source, wanted, self.objects)
        dtype = identity["dtype"].get("compute", "auto")
        _check_same_encoding(self.cache, recipe, dtype)
        with closing(VideoDecoder(recipe.make_decode_setup())) as decoder:
            record, frames = decode_again(row, decoder, self.objects, self.roots)
        comparison = compare_frames(recipe, config.device, dtype, {**row, **record}, frames, wanted)
        origin = "The source was encoded again, by the model and with the frames of the cache"
        return replace(comparison, origin=f"{origin}{self._describe_difference_to_stored(wanted, comparison)}.")

    def _describe_difference_to_stored(self, wanted: Sequence[RequestedSelection], comparison: Comparison) -> str:
        """Return a clause with the share of the new selection that the cache stores; "" if it stores the same.

        The first requested selection of the cache's method that differs from the stored one counts. Without such a
        request, "" is returned too.
        """
        for row in wanted:
            if is_stored(self.cache.identity, row):
                stored = self.cache.get(self.video_id, row.retention_ratio).index
                new = comparison.selections[row.label, row.retention_ratio].index
                if not torch.equal(stored, new):
                    common = torch.isin(new, stored).sum().item() / len(new)
                    return f"; of {row.label} at {row.retention_ratio:g} the cache holds {common:.1%} of what is shown"
        return ""


def is_stored(identity: CacheIdentity, row: RequestedSelection) -> bool:
    """Return True if a cache of this identity holds a selection: same method and seed, at a ratio that it serves.

    A ratio below the stored one is served only for a nested method.
    """
    entry = {**describe_method(row.pruner), **({"seed": row.seed} if row.pruner.seeded else {})}
    above = row.retention_ratio - identity["retention_ratio"]
    return entry == identity["pruner"] and (abs(above) <= 1e-9 or (row.pruner.nested and above < 0))


def _explain_insufficient_tokens(
    cache: TokenCache, wanted: Sequence[RequestedSelection], family: str
) -> tuple[str, dict[str, str]]:
    """Find what the stored tokens lack for the methods to select from them.

    Returns:
        The reason why they do not suffice and {}, or "" and the columns of evidence by label. They suffice if they are
        all tokens in bfloat16, with the evidence that each method needs.
    """
    identity = cache.identity
    if not is_whole(identity):
        own = f"{identity['pruner']['method']} at {identity['retention_ratio']:g}"
        others = ", ".join(dict.fromkeys(row.label for row in wanted if not is_stored(identity, row)))
        return f"{cache.store} holds only the tokens of {own}, and {others} would select from all tokens", {}
    if cache.codec is not BFLOAT16:
        return f"{cache.store} holds its tokens as {cache.codec.name}, not as the encoder gave them", {}
    columns: dict[str, str] = {}
    for row in wanted:
        try:
            pairs = find_evidence_columns(row.label, row.pruner, identity, family_class(family))
        except UsageError:  # if no encoder of this family gives it, the plan of another encoding says so
            return f"{cache.store} does not hold what {row.label} needs besides tokens", {}
        columns |= {make_label(name, row.pruner.sources[name]): column for name, column in pairs}
    return "", columns


def _check_same_encoding(cache: TokenCache, recipe: Recipe, dtype: str) -> None:
    """Raise UsageError unless model, preprocessing and sampling of a recipe are those of the cache.

    A pooling head and ``dtype``, which the recipe's identity needs, are not compared.
    """
    names = ("type", "weights", "family")  # a pooling head makes no tokens

    def describe_encoding(identity: CacheIdentity) -> dict[str, object]:
        model = {name: value for name, value in identity["model"].items() if name in names}
        return {"model": model, "preprocessing": identity.get("preprocessing"), "sampling": identity.get("sampling")}

    lines = list_differences(describe_encoding(cache.identity), describe_encoding(recipe.identity(dtype)))
    if lines:
        raise UsageError(f"{cache.store} was made with other settings than the model has now: {'; '.join(lines)}")
