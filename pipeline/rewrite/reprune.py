"""``jobs.reprune``: prune a cache of all tokens with a method, without a video or an encoder.

The result is bit for bit the cache that ``jobs.prune`` makes with this method.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch

from gstep.backbones import family_class
from gstep.evidence import HEAD_SOURCES
from gstep.pruners import get_method_name, read_pruner
from gstep.pruners.base import Pruner
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import CacheHeader, CacheIdentity, PrunerIdentity, change_codec, describe_method
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.cache.writer import VideoItem
from pipeline.errors import UsageError, convert_usage_errors
from pipeline.generate.late_pruning import find_evidence_columns, is_whole, make_visual_tokens
from pipeline.generate.model import choose_family
from pipeline.own_method import prune_or_raise_fault
from pipeline.prune.encode_stage import collect_kept_tokens, make_pruning_columns
from pipeline.rewrite.recode import Rewrite, check_stores_bfloat16, read_newest_config
from pipeline.rows import Json, VideoRecord


def plan_repruning(
    source: TokenCache, method: str, params: Mapping[str, str], ratio: float, seed: int, codec: str
) -> Rewrite:
    """Plan a cache of the tokens that a method keeps of a cache of all tokens; nothing is written.

    A user method is imported. Videos will be pruned on the GPU if there is one.

    Args:
        params: the parameters of the method, as text.
        ratio: the requested retention ratio; the header gets the method's nominal ratio.

    Raises:
        UsageError: the source lacks tokens or needed evidence or is not bfloat16, the method or a parameter is invalid,
            or the method depends on the question.
    """
    check_stores_bfloat16(source, "prune")
    identity = source.identity
    if not is_whole(identity):
        raise UsageError(
            f"{source.store} has only the tokens of {identity['pruner']['method']} at "
            f"{identity['retention_ratio']:g}, not all tokens: make one with python -m jobs.prune --pruner none"
        )
    with convert_usage_errors():
        family = family_class(choose_family(identity["model"]) or identity["model"]["type"])
        pruner = read_pruner(method, params, family=family.variant)
        if not pruner.cacheable:
            raise UsageError(f"--pruner {method} selects anew for every question, so its tokens cannot be cached")
        columns = dict(find_evidence_columns(method, pruner, identity, family))
        header = _make_repruned_header(source.header, pruner, pruner.nominal_ratio(ratio), seed, codec)
    left_out = {"evidence"} if HEAD_SOURCES & {*pruner.sources.values()} else {"evidence", "siglip"}
    config: dict[str, Json] = {
        **{name: value for name, value in read_newest_config(source.store).items() if name not in left_out},
        **{"pruner": get_method_name(type(pruner)), "retention_ratio": ratio, "seed": seed},
        **{"pruner_param": [f"{name}={value}" for name, value in params.items()], "token_codec": codec},
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _Repruning(source, header, config, tuple(columns.values()), pruner, seed, columns, device)


def _make_repruned_header(header: CacheHeader, pruner: Pruner, ratio: float, seed: int, codec: str) -> CacheHeader:
    """Return the header that ``jobs.prune`` would give a cache of this method at this ratio.

    Entries about evidence and the pooling head stay only if the method uses them; the columns of evidence are left out.
    """
    new_header = change_codec(header, codec)
    identity = {name: value for name, value in new_header["identity"].items() if name != "evidence"}
    method: PrunerIdentity = {**describe_method(pruner), **({"seed": seed} if pruner.seeded else {})}  # type: ignore[typeddict-item]
    sources = {*pruner.sources.values()}
    model = dict(new_header["identity"]["model"])
    dtype = dict(new_header["identity"]["dtype"])
    if not HEAD_SOURCES & sources:
        model.pop("pooling_head", None)
    dtype.pop("evidence", None)
    if sources:
        dtype["evidence"] = "bfloat16"
    identity |= {"model": model, "pruner": method, "retention_ratio": ratio, "dtype": dtype}
    return {**new_header, "identity": cast(CacheIdentity, identity)}


@dataclass(frozen=True)
class _Repruning(Rewrite):
    """A rewrite that prunes each video as the encoder's actor of ``jobs.prune`` does.

    Attributes:
        columns: the evidence that the method reads: its name -> the column of the source.
        device: "cuda" or "cpu".
    """

    pruner: Pruner
    seed: int
    columns: Mapping[str, str]
    device: str
    order: ClassVar[TokenOrder] = "index"

    def change(self, video: CachedVideo, record: VideoRecord) -> VideoItem:
        """Prune a video of all tokens; return its record, with the columns of pruning, and the kept tokens.

        Raises:
            VideoFault: the method failed for this video.
            MethodFails: a user method would fail for every video.
        """
        stored = replace(video.visual, extra=json.loads(record.get("model_extra") or "{}"))  # JSON is text in a rewrite
        visual = make_visual_tokens(stored, self.columns.items(), self.device)
        levels = (level.to(self.device).view(visual.tokens.shape) for level in video.deepstack)
        visual = replace(visual, deepstack=tuple(levels))
        start = time.perf_counter()
        pruned = prune_or_raise_fault(self.pruner, visual, self.header["identity"]["retention_ratio"], self.seed)
        columns: VideoRecord = {**make_pruning_columns(pruned, visual), "prune_s": time.perf_counter() - start}
        return VideoItem({**record, **columns}, collect_kept_tokens(pruned, visual))
