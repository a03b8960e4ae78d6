"""What a question about a video costs: from the video itself (online), and from a cache of its tokens made on the spot.

Decoding and encoding do not depend on the question or on the share that is kept: they are measured once a video, repeat
and kind of evidence, and count for every question that is asked online. A cache is read from the files that were just
written, which the system still has in memory.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gstep import PrunedTokens, make_pruner
from gstep.language import Visual
from jobs.benchmark.efficiency.parts import Answers, Encoded, Videos
from jobs.benchmark.efficiency.samples import Built, Found, Sample, highest, timed
from jobs.benchmark.efficiency.setup import FULL, Arm, Job
from jobs.benchmark.peak_memory import peak_memory
from pipeline.cache.header import header_bytes
from pipeline.cache.reader import HEADER, TokenCache
from pipeline.cache.token_shard import TokenShard
from pipeline.cache.writer import PrunedVideo, commit, write_token_shard
from pipeline.generate.held_videos import n_bytes
from pipeline.prune.encode_stage import kept_tokens, pruned_columns
from pipeline.rows import ManifestRow, VideoRecord
from pipeline.storage.stores import LocalStore

Say = Callable[[str], None]
Round = Callable[[Sequence[ManifestRow], int, int, Sequence[Found]], None]


class Bench:
    """The measurement of one job: its loaded models, and the caches that it makes below ``folder``.

    Close it after use.
    """

    def __init__(self, job: Job, folder: Path, say: Say) -> None:
        self._job, self._folder, self._say = job, folder, say
        say(f"loading {job.request.source.name}")
        self._videos, self._answers = Videos(job), Answers(job)
        self._device = job.runtime.device
        self._caches: dict[str, TokenCache] = {}
        self._n_commits = 0

    def close(self) -> None:
        """Close the decoder."""
        self._videos.close()

    def run(self) -> list[Found]:
        """Measure all arms in turns, so that disturbances of the machine affect all alike.

        All arms first answer from the videos, then from caches, when no vision tower is in memory any more. On a CPU
        each half ends with runs that measure peak memory. Raises RunFailed, UsageError.
        """
        found = [Found(arm) for arm in self._job.arms]
        for one in found:
            self._store(one.arm).make()
            self._store(one.arm).put(HEADER, self._header(one.arm))
        self._rounds("online", self._online, found)
        weights = _weight_bytes(self._answers.llm.model)
        if self._device == "cpu":
            self._say("online: memory")
            self._online_peaks(found, weights + _weight_bytes(self._videos.tower.model))
        self._videos.forget_tower()
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        self._caches = {one.arm.label: TokenCache(str(self._store(one.arm))) for one in found}
        self._rounds("cached", self._cached, found)
        if self._device == "cpu":
            self._say("cached: memory")
            self._cached_peaks(found, weights)
        return found

    def _rounds(self, mode: str, measure: Round, found: Sequence[Found]) -> None:
        """Run ``measure`` on the first video once as a warm-up, then on all videos in every repeat."""
        videos = self._job.videos
        self._say(f"{mode}: to warm up")
        measure(videos[:1], 1, 0, [Found(one.arm) for one in found])
        for repeat in range(1, self._job.repeats + 1):
            self._say(f"{mode}: {repeat} of {self._job.repeats}")
            measure(videos, self._job.questions, repeat, found)

    def _online(self, videos: Sequence[ManifestRow], questions: int, repeat: int, found: Sequence[Found]) -> None:
        """Decode and encode each video, ask every arm its questions, and write the video into the arm's cache."""
        for row in videos:
            decoded = self._videos.decoded(row)
            for evidence in dict.fromkeys(one.arm.evidence for one in found):
                encoded = self._videos.encoded(decoded, evidence)
                for one in (one for one in found if one.arm.evidence == evidence):
                    self._say(f"online: {row['video_id']}, {one.arm.label}")
                    for number in range(questions):
                        self._ask_online(one, encoded, number, repeat)
                    one.built.append(self._built(one.arm, encoded, repeat))

    def _ask_online(self, one: Found, encoded: Encoded, number: int, repeat: int) -> None:
        """Ask one question about an encoded video, and append its sample to the arm's."""
        (visual, _), prune_s, prune_peak = self._answers.chosen(one.arm, encoded.visual, number)
        sample = self._answers.asked(one.arm, visual, number)
        sample = replace(
            sample,
            mode="online",
            video_id=encoded.decoded.record["video_id"],
            repeat=repeat,
            video_decode_s=encoded.decoded.seconds,
            encode_s=encoded.seconds,
            prune_s=prune_s,
            peak_bytes=highest(encoded.peak_bytes, prune_peak, sample.peak_bytes),
        )
        one.online.append(sample)
        one.online_peak = highest(one.online_peak, sample.peak_bytes)

    def _built(self, arm: Arm, encoded: Encoded, repeat: int) -> Built:
        """Prune a video and write it into the arm's cache, timed; later repeats replace the row of earlier ones."""

        def prune() -> PrunedTokens:
            if arm.late is None or not arm.stored:
                return make_pruner(FULL).prune(encoded.tokens, 1.0)
            return arm.late.select(encoded.visual, self._device)

        pruned, prune_s, _ = timed(prune, self._device)
        record: VideoRecord = {
            **encoded.decoded.record,
            **pruned_columns(pruned, encoded.tokens),
            "attempts": repeat + 1,
            "encode_s": encoded.seconds,
            "prune_s": prune_s,
            "runtime": json.dumps(self._job.runtime.describe()),
            "model_extra": json.dumps(dict(encoded.visual.extra)),
        }

        def write() -> None:
            kept = kept_tokens(pruned, encoded.tokens, arm.held)
            rows = write_token_shard([PrunedVideo(record, kept)], store=self._store(arm), run_id="efficiency")
            self._n_commits += 1
            commit(self._store(arm), "efficiency", self._n_commits, rows)

        seconds = timed(write, self._device).seconds
        return Built(record["video_id"], repeat, encoded.decoded.seconds, encoded.seconds, prune_s, seconds)

    def _cached(self, videos: Sequence[ManifestRow], questions: int, repeat: int, found: Sequence[Found]) -> None:
        """Ask every arm its questions about each video from the arm's cache."""
        for row in videos:
            for one in found:
                self._say(f"cached: {row['video_id']}, {one.arm.label}")
                for number in range(questions):
                    sample = self._ask_cached(one.arm, row["video_id"], number)
                    one.cached.append(replace(sample, mode="cached", video_id=row["video_id"], repeat=repeat))
                    one.cached_peak = highest(one.cached_peak, sample.peak_bytes)

    def _ask_cached(self, arm: Arm, video_id: str, number: int) -> Sample:
        """Read a video from the arm's cache, prune there if the arm does, ask one question, and return the sample."""
        visual, read_s, _ = timed(lambda: self._caches[arm.label].get(video_id, evidence=arm.held).visual, "cpu")
        prune_s, prune_peak = 0.0, None
        if not arm.stored:
            (visual, _), prune_s, prune_peak = self._answers.chosen(arm, visual, number)
        sample = self._answers.asked(arm, visual, number)
        peak = highest(prune_peak, sample.peak_bytes)
        n_read = self._bytes_read(arm, video_id)
        return replace(sample, read_s=read_s, prune_s=prune_s, bytes_read=n_read, peak_bytes=peak)

    def _bytes_read(self, arm: Arm, video_id: str) -> int:
        """Return the stored bytes of the rows and columns read for a video, by the token shard's footer."""
        cache = self._caches[arm.label]
        row = cache.metadata(video_id)
        shard = TokenShard(cache.store, row["token_shard"], row["footer_hash"])
        wanted = cache.wanted(row, cache.reading(None, "index", arm.held, False))
        return sum(end - start for start, end in shard.spans(wanted))

    def _online_peaks(self, found: Sequence[Found], weights: int) -> None:
        """Measure peaks on a CPU: the weights, and the growth in encoding or answering, whichever is larger."""
        decoded = self._videos.decoded(self._job.videos[0])
        for evidence in dict.fromkeys(one.arm.evidence for one in found):
            encoder = self._videos.encoder(evidence)
            encoding = _grown(lambda encoder=encoder: encoder.encoded(decoded.frames))  # type: ignore[misc]
            encoded = self._videos.encoded(decoded, evidence)
            for one in (one for one in found if one.arm.evidence == evidence):

                def ask(one: Found = one, visual: Visual = encoded.visual) -> None:
                    (kept, _), _, _ = self._answers.chosen(one.arm, visual, 0)
                    self._answers.asked(one.arm, kept, 0)

                asking = _grown(ask)
                if encoding is not None and asking is not None:
                    one.online_peak = weights + max(encoding, n_bytes(encoded.visual) + asking)

    def _cached_peaks(self, found: Sequence[Found], weights: int) -> None:
        """Measure peak memory of answering from the cache on a CPU: the weights plus the growth of one answer."""
        video_id = self._job.videos[0]["video_id"]
        for one in found:
            asking = _grown(lambda one=one: self._ask_cached(one.arm, video_id, 0))  # type: ignore[misc]
            one.cached_peak = None if asking is None else weights + asking

    def _store(self, arm: Arm) -> LocalStore:
        """Return the store of an arm's cache."""
        return LocalStore(self._folder / f"cache-{self._job.arms.index(arm)}")

    def _header(self, arm: Arm) -> bytes:
        """Return the cache header for an arm: of its kept tokens, or of all tokens with evidence if it prunes later."""
        request, static = self._job.request, self._videos.static(self._job.builder.deepstack_levels)
        held = {name: where for name, where in request.evidence.items() if name in arm.held}
        request = replace(request, evidence=held)
        if arm.stored and arm.late is not None:
            request = replace(request, pruner=arm.late.pruner, retention_ratio=arm.late.retention_ratio)
        return header_bytes(request.header(self._job.runtime.dtype_name, static))


def _grown(work: Callable[[], object]) -> float | None:
    """Return the bytes by which ``work`` raises the process's peak memory, or None where that cannot be measured."""
    grown = peak_memory(work)
    return None if grown is None else grown * 1e6


def _weight_bytes(module: Any) -> int:
    """Return the bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
