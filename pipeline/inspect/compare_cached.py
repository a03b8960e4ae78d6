"""A comparison of methods on a video of a cache: on its stored tokens where they serve, else on its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from gstep.backbones import ModelSource, family_class
from gstep.evidence import HEAD_SOURCES, make_label
from gstep.pruners.base import Pruner
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import CacheIdentity, describe_method, list_differences
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError, VideoFault, usage_errors
from pipeline.generate.late_pruning import find_evidence_columns, is_whole, make_visual_tokens
from pipeline.generate.model import choose_family, choose_model
from pipeline.inputs.named_videos import Roots
from pipeline.inspect.comparison import Comparison, MethodSelection
from pipeline.inspect.page import grid_of
from pipeline.inspect.selecting import Wanted, compare_frames, list_wanted, load_encoder, plan_encoding, select
from pipeline.inspect.thumbnails import source_pictures
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_again import decode_again, read_run_config
from pipeline.prune.recipe import Recipe
from pipeline.rows import Json, VideoRow
from pipeline.runner.run_record import RUNS, newest_record
from pipeline.storage.s3 import Objects

DEFAULT_RATIO = 0.25  # as jobs.prune


@dataclass(frozen=True)
class CachedComparison:
    """A comparison to make on a video of a cache.

    Attributes:
        video_id: the video.
        config: the options of the call.
        roots: below which sources are read.
        has_model: whether the call names the model.
    """

    cache: TokenCache
    video_id: str
    config: PruneConfig
    objects: Objects
    roots: Roots
    has_model: bool

    def compare(self, methods: Sequence[str | Pruner] | None, ratios: Sequence[float]) -> Comparison:
        """Compare the methods on the stored tokens where they serve, else on the source.

        Without methods the selection is the one that the cache stores; without ratios there is one.
        """
        cache, identity, stored_ratio = self.cache, self.cache.identity, self.cache.retention_ratio
        if methods is None:
            return self._show_stored({identity["pruner"]["method"]: self._own_settings()}, ratios or [stored_ratio])
        ratios = ratios or [stored_ratio if stored_ratio < 1 else DEFAULT_RATIO]
        family = choose_family(identity["model"], self.config.family) or identity["model"]["type"]
        with usage_errors():
            kind = family_class(family)
        wanted = list_wanted(methods, ratios, self.config.seed, kind.variant)
        if all(is_stored(identity, row) for row in wanted):
            return self._show_stored(
                {row.label: row.settings for row in wanted}, [row.retention_ratio for row in wanted]
            )
        lacking, columns = _find_lacking(cache, wanted, family)
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

    def _own_settings(self) -> dict[str, Json]:
        """Return the parameters of the cache's own method, and its seed."""
        entry = self.cache.identity["pruner"]
        return {**entry["params"], **({"seed": entry["seed"]} if "seed" in entry else {})}

    def _show_stored(self, settings: Mapping[str, Mapping[str, Json]], ratios: Sequence[float]) -> Comparison:
        """Return the selections that the cache stores, at these ratios; ``settings`` are of each label."""
        selections = {}
        for ratio in sorted(set(ratios), reverse=True):
            video = self.cache.get(self.video_id, ratio)
            row = video.metadata
            for label, values in settings.items():
                counts = row["n_total"], row["tokens_per_frame"]
                selections[label, ratio] = MethodSelection(label, ratio, video.index, video.merged, *counts, values)
        return self._make_comparison(selections, row, f"The selections are those that {self.cache.store} stores.")

    def _compare_tokens(self, wanted: Sequence[Wanted], columns: Mapping[str, str]) -> Comparison:
        """Compare the methods on the stored tokens, which are all tokens; ``columns`` of evidence are by label."""
        video = self.cache.get(self.video_id, evidence=tuple(columns.values()))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        visual = make_visual_tokens(video.visual, columns.items(), device)
        selections = {(item.method, item.retention_ratio): item for item in select(wanted, visual)}
        origin = f"The methods selected from the tokens that {self.cache.store} stores, which are all tokens."
        return self._make_comparison(selections, video.metadata, origin)

    def _make_comparison(
        self, selections: Mapping[tuple[str, float], MethodSelection], row: VideoRow, origin: str
    ) -> Comparison:
        """Return the comparison of a video whose frames are decoded again for their pictures, if they can be."""
        identity = self.cache.identity
        pictures = source_pictures(row, identity["sampling"], self.objects, self.roots)
        return Comparison(
            self.video_id, selections, row, grid_of(row), identity["model"], identity["sampling"], origin, pictures
        )

    def _encode_again(self, wanted: Sequence[Wanted], lacking: str) -> Comparison:
        """Encode the source again as the cache's run did, and compare the methods on that.

        ``lacking`` is the reason why stored tokens do not serve. Raises VideoFault of the stage decode where the source
        cannot be had.
        """
        store, identity = self.cache.store, self.cache.identity
        row = self.cache.metadata(self.video_id)
        if row["status"] != "ok":
            self.cache.get(self.video_id)  # raises the error of a video without tokens
        run = newest_record(store)
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
        with usage_errors():
            source = ModelSource.resolve(config.model, config.revision, quantized=True, family=config.family)
        recipe = plan_encoding(config, source, wanted, self.objects)
        dtype = identity["dtype"].get("compute", "auto")
        _check_same_encoding(self.cache, recipe, dtype)
        with closing(VideoDecoder(recipe.decode_setup())) as decoder:
            record, frames = decode_again(row, decoder, self.objects, self.roots)
        encoder = load_encoder(recipe, config.device, dtype)
        comparison = compare_frames(encoder, recipe, row, record, frames, wanted)
        origin = "The source was encoded again, by the model and with the frames of the cache"
        return replace(comparison, origin=f"{origin}{self._difference_to_stored(wanted, comparison)}.")

    def _difference_to_stored(self, wanted: Sequence[Wanted], comparison: Comparison) -> str:
        """Return how far the new selection of the cache's own method is from the stored one; "" if it is the same."""
        for row in wanted:
            if is_stored(self.cache.identity, row):
                stored = self.cache.get(self.video_id, row.retention_ratio).index
                new = comparison.selections[row.label, row.retention_ratio].index
                if not torch.equal(stored, new):
                    common = torch.isin(new, stored).sum().item() / len(new)
                    return f"; of {row.label} at {row.retention_ratio:g} the cache holds {common:.1%} of what is shown"
        return ""


def is_stored(identity: CacheIdentity, row: Wanted) -> bool:
    """Return True if a cache of this identity holds a selection: its own method, at a ratio that it serves."""
    entry = {**describe_method(row.pruner), **({"seed": row.seed} if row.pruner.seeded else {})}
    above = row.retention_ratio - identity["retention_ratio"]
    return entry == identity["pruner"] and (abs(above) <= 1e-9 or (row.pruner.nested and above < 0))


def _find_lacking(cache: TokenCache, wanted: Sequence[Wanted], family: str) -> tuple[str, dict[str, str]]:
    """Return (why the stored tokens do not serve the methods, the columns of evidence by label); "" if they serve.

    Stored tokens serve if they are all tokens, bit for bit as the encoder gave them, with the evidence.
    """
    identity = cache.identity
    if not is_whole(identity):
        own = f"{identity['pruner']['method']} at {identity['retention_ratio']:g}"
        others = ", ".join(dict.fromkeys(row.label for row in wanted if not is_stored(identity, row)))
        return f"{cache.store} holds the tokens of {own} alone, and {others} would choose among all tokens", {}
    if cache.codec is not BFLOAT16:
        return f"{cache.store} holds its tokens as {cache.codec.name}, not as the encoder gave them", {}
    columns: dict[str, str] = {}
    for row in wanted:
        try:
            found = find_evidence_columns(row.label, row.pruner, identity, family_class(family))
        except UsageError:  # if no encoder of this family gives it, the plan of another encoding says so
            return f"{cache.store} does not hold what {row.label} needs besides tokens", {}
        columns |= {make_label(name, row.pruner.sources[name]): column for name, column in found}
    return "", columns


def _check_same_encoding(cache: TokenCache, recipe: Recipe, dtype: str) -> None:
    """Raise UsageError unless model and frames of a recipe are those of the cache."""
    names = ("type", "weights", "family")  # a pooling head makes no tokens

    def encoding_of(identity: CacheIdentity) -> dict[str, object]:
        model = {name: value for name, value in identity["model"].items() if name in names}
        return {"model": model, "preprocessing": identity.get("preprocessing"), "sampling": identity.get("sampling")}

    lines = list_differences(encoding_of(cache.identity), encoding_of(recipe.identity(dtype)))
    if lines:
        raise UsageError(f"{cache.store} was made with other settings than the model has now: {'; '.join(lines)}")
