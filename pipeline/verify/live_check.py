"""``jobs.verify --live``: encode some videos again from their sources with the cache's settings, and compare.

Videos are decoded with the default decoder and encoded with this package's model code: a cache never selects code to
run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console

from gstep.evidence import is_frame_evidence
from pipeline.cache.cached_video import CachedVideo, view_as_bfloat16
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.live import select_ok
from pipeline.cache.reader import TokenCache
from pipeline.cache.writer import KeptTokens
from pipeline.errors import ReplacedSource, UsageError, VideoFault, convert_usage_errors
from pipeline.inputs.manifest import sort_roots
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_again import decode_again, read_run_config
from pipeline.prune.encode_stage import VideoEncoder
from pipeline.prune.recipe import resolve_recipe
from pipeline.rows import VideoRecord, VideoRow
from pipeline.runner.cluster.connection import find_package_version
from pipeline.runner.run_record import RUNS, RunRecord, find_newest_record, read_record
from pipeline.storage.s3 import Objects
from pipeline.verify.report import Kind, LiveResult, Problem, Report
from pipeline.video.sampling import DECODING_RULES

# The same program on the same kind of machine gives the same bits. Other versions and processors round differently, and
# a near tie then selects another token. Measured on the sample clips: float32 and bfloat16 differ by at most 0.017 with
# 94 % of the positions in common; two different clips differ by at least 0.65 with 60 % in common.
MAX_ROUNDING = 0.1  # norm of the differences over the tokens' norm, above which no rounding explains them
MIN_SHARED = 0.5  # share of common positions below which no rounding explains the difference
_KINDS = {"failed": Kind.LIVE_FAILED, "source-changed": Kind.SOURCE_CHANGED}  # of problems, by a result's state
_RUNTIME = ("device", "device_name", "dtype", "attn_implementation", "cuda", "shared_pass")


class LiveCheck:
    """A check that encodes videos again as the cache's runs did, and compares the tokens with the stored ones."""

    def __init__(self, cache: TokenCache, model: str | None, objects: Objects, video_roots: Sequence[str] = ()) -> None:
        """Load the model of the cache's newest run onto this machine's GPU or CPU; this may download its files.

        Args:
            model: the model's folder or id; None for the one in the run's record.
            video_roots: folders and prefixes below which sources may be read.

        Raises:
            UsageError: no record says how the cache was made, the method or family is not part of this package, or the
                model cannot be loaded or is not the cache's.
        """
        store = cache.store
        self._roots = sort_roots(video_roots)
        self._cache = cache
        self._objects = objects
        run = find_newest_record(store)
        if run is None:
            raise UsageError(f"{store}/{RUNS}: no record of a run says which model the tokens are from")
        config = read_run_config(cache, run, model)  # all runs of a cache made tokens with the same settings
        if ":" in config.pruner:
            raise UsageError(
                f"--live: this cache was pruned by {config.pruner}, a method from outside gstep; what a cache says "
                "chooses no code, so its videos are not encoded again here"
            )
        if config.family is not None and ":" in config.family:
            raise UsageError(
                f"--live: this cache was made with the family {config.family}, which is not part of this package; "
                "what a cache says chooses no code, so its videos are not encoded again here"
            )
        recipe = resolve_recipe(config, objects).match_cache(store, Console(quiet=True))
        self._decode = recipe.make_decode_setup()
        with convert_usage_errors():
            self._encoder = VideoEncoder(recipe.make_encode_setup("auto", recipe.dtype))

    def run(self, live: pa.Table, count: int, seed: int, report: Report) -> None:
        """Encode ``count`` random ok videos of ``live`` again, and add a result for each to ``report``.

        All of them are taken, with a note, if there are fewer. A changed source, a failure, and a difference that
        rounding cannot explain also add a problem; a source that is missing, unreadable or not allowed does not.
        """
        ids = select_ok(live)["video_id"].to_pylist()
        if len(ids) < count:
            report.notes.append(f"--live: of {count} videos {len(ids)} are sound and can be encoded again")
        with closing(VideoDecoder(self._decode)) as decoder:
            for video_id in random.Random(seed).sample(ids, min(count, len(ids))):
                row = self._cache.metadata(video_id)
                result = self._compare(row, decoder)
                report.live.append(result)
                if (kind := _KINDS.get(result.state)) is not None:
                    report.problems.append(Problem(kind, result.note, row["token_shard"], video_id))
                elif why := explain_suspicion(result):
                    report.problems.append(Problem(Kind.LIVE, why, row["token_shard"], video_id))

    def _compare(self, row: VideoRow, decoder: VideoDecoder) -> LiveResult:
        """Encode one video again, and compare its tokens with the stored tokens.

        A source that is gone, changed or cannot be encoded is not an error: the state of the result says so. For a
        cache with a lossy codec, the new tokens go through the codec first.
        """
        video_id = row["video_id"]
        try:
            record, frames = decode_again(row, decoder, self._objects, self._roots)
        except ReplacedSource as fault:
            return LiveResult(video_id, "source-changed", fault.message)
        except VideoFault as fault:
            if fault.fault_class in ("io", "policy"):  # or it must not be read
                return LiveResult(video_id, "source-gone", fault.message)
            return LiveResult(video_id, "failed", str(fault))
        try:
            encoded = self._encoder.encode_video_alone(record, frames)
        except VideoFault as fault:
            return LiveResult(video_id, "failed", str(fault))
        assert encoded.kept is not None  # encode_one raises where a video fails
        kept_tokens = encoded.kept
        codec = self._cache.codec
        if codec is not BFLOAT16:  # compare with what a reader of this cache gets
            parts = [
                codec.round_trip(part).view(torch.int16).numpy()
                for part in (kept_tokens.tokens, *kept_tokens.deepstack)
            ]
            kept_tokens = replace(kept_tokens, tokens=parts[0], deepstack=parts[1:])
        result = compare(
            self._cache.get(video_id, order="selection", evidence=tuple(self._cache.evidence)), kept_tokens
        )
        if encoded.record["frame_indices"] != row["frame_indices"]:
            result = replace(result, note="other frames were sampled")
        run = read_record(self._cache.store, f"{RUNS}/{row['run_id']}.json")
        return replace(result, versions=list_version_changes(row, run, encoded.record))


def compare(cached: CachedVideo, encoded: KeptTokens) -> LiveResult:
    """Compare a stored video, read in order of selection, with newly kept tokens.

    The state is "same" only if all bits are equal, including evidence and deepstack levels, and otherwise "different".
    The differences are computed over the positions that both have, and over all frames for evidence per frame, unless
    the numbers of frames differ; if the vectors differ in width, there are none.
    """
    names, stored = sorted(cached.evidence), KeptTokens.of(cached, cached.deepstack, cached.evidence)
    parts = [(kept.tokens, *kept.deepstack, *(kept.evidence[name] for name in names)) for kept in (stored, encoded)]
    old, new = ([view_as_bfloat16(part).view(part.shape) for part in vectors] for vectors in parts)
    if [part.shape[1] for part in old] != [part.shape[1] for part in new]:
        return LiveResult(cached.video_id, "different", "tokens of another size", same_indices=0.0)
    common, cached_places, encoded_places = np.intersect1d(stored.index, encoded.index, return_indices=True)
    of_frames = [False] * (1 + len(cached.deepstack)) + [is_frame_evidence(name) for name in names]
    pairs = [
        (a.float(), b.float()) if whole else (a[cached_places].float(), b[encoded_places].float())
        for whole, a, b in zip(of_frames, old, new, strict=True)
        if not whole or len(a) == len(b)
    ]
    same = np.array_equal(stored.index, encoded.index) and all(map(np.array_equal, *parts))
    return LiveResult(
        video_id=cached.video_id,
        state="same" if same else "different",
        same_indices=len(common) / max(len(encoded.index), len(stored.index)),
        max_difference=max(float((a - b).abs().max()) for a, b in pairs) if len(common) else None,
        relative_difference=max(float((a - b).norm() / a.norm().clamp(min=1e-30)) for a, b in pairs),
    )


def explain_suspicion(result: LiveResult) -> str:
    """Return the reason why rounding cannot explain a difference; "" if it can, or if the state is not "different".

    It cannot if fewer than MIN_SHARED of the positions agree, if the relative difference is above MAX_ROUNDING or
    unknown, or if the same versions and devices made both.
    """
    if result.state != "different":
        return ""
    share, relative = result.same_indices or 0.0, result.relative_difference
    numbers = f"{share:.1%} of the positions, tokens apart by {result.max_difference} at most"
    if share < MIN_SHARED or relative is None or relative > MAX_ROUNDING:
        return f"encoded again, it is beyond rounding: {numbers}"
    return "" if result.versions else f"encoded again by the same versions, it is not the same: {numbers}"


def list_version_changes(row: VideoRow, run: RunRecord, record: VideoRecord) -> dict[str, tuple[str, str]]:
    """Return the versions, decoding rules and devices that differ from those at encoding time: name -> (then, now).

    Args:
        row: the cached row.
        run: the record of the run that encoded it; {} if it is missing.
        record: the record of the new encoding.
    """
    then: dict[str, object] = dict(run.get("versions", {}))
    now: dict[str, object] = {name: find_package_version(name) for name in then}
    if run:
        then["decoding_rules"], now["decoding_rules"] = run.get("decoding_rules", 1), DECODING_RULES
    before, after = row["runtime"] or {}, json.loads(record.get("runtime") or "{}")
    if after:
        then |= {name: before.get(name) for name in _RUNTIME}
        now |= {name: after.get(name) for name in _RUNTIME}
    then |= {"backend": row["backend"], "backend_version": row["backend_version"]}
    now |= {"backend": record.get("backend"), "backend_version": record.get("backend_version")}
    return {name: (str(then[name]), str(now[name])) for name in then if then[name] != now[name]}
