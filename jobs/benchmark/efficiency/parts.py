"""The parts of answering a question about a video, each timed: decode, encode, prune, prompt, language model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from gstep import PrunedTokens, VisualTokens
from gstep.backbones import Backbone, StaticParts, family_of
from gstep.evidence import is_per_frame
from gstep.language import Decoding, LanguageModel, Visual, load_language_model
from jobs.benchmark.efficiency.samples import Sample, Timed, timed
from jobs.benchmark.efficiency.setup import Arm, Job
from pipeline.errors import RunFailed, UsageError
from pipeline.generate.asking import Embedders
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_stage import VideoEncoder, without_pixels
from pipeline.rows import ManifestRow, VideoRecord

_TEXT = (
    "Question {number}: what happens in this video after the person has looked at the camera?\n"
    "A. They sit down.\nB. They leave the room.\nC. They ride a bike.\nD. Nothing happens.\n"
    "Answer with the option's letter from the given choices directly."
)


@dataclass(frozen=True)
class Decoded:
    """A decoded video: its record, its frames [t,h,w,3] and the seconds that decoding took."""

    record: VideoRecord
    frames: NDArray[np.uint8]
    seconds: float


@dataclass(frozen=True)
class Encoded:
    """An encoded video: all its tokens as a cache and as a prompt take them, and encoding's seconds and peak bytes."""

    decoded: Decoded
    tokens: VisualTokens
    visual: Visual
    seconds: float
    peak_bytes: float | None


class Videos:
    """The decoder and encoder of a job's videos. Close it after use."""

    def __init__(self, job: Job) -> None:
        self._request, self._runtime = job.request, job.runtime
        self.tower: Backbone = family_of(job.request.source).load(job.runtime)
        self._decoder = VideoDecoder(job.request.decode_setup())

    def close(self) -> None:
        """Close the decoder."""
        self._decoder.close()

    def forget_tower(self) -> None:
        """Release the vision tower, so that it does not count in the memory of answering from caches."""
        del self.tower

    def static(self, deepstack_levels: int) -> StaticParts:
        """Return a cache header's facts of the model: width, newline row, deepstack levels; also for random weights."""
        return StaticParts(self.tower.hidden_size, self._newline(), deepstack_levels)

    def _newline(self) -> torch.Tensor | None:
        """Return the newline row [D] in the precision of a cache."""
        row = self.tower.newline()
        return None if row is None else row.to(torch.bfloat16)

    def decoded(self, row: ManifestRow) -> Decoded:
        """Decode a video. Raise RunFailed if it cannot be read."""

        def read() -> tuple[VideoRecord, NDArray[np.uint8] | None]:
            todo = {**dict.fromkeys(("start_s", "end_s", "manifest", "policy", "size")), **row, "attempts": 1}
            with self._decoder.open(todo) as source:  # type: ignore[arg-type]
                return self._decoder.decode_one(todo, source)  # type: ignore[arg-type]

        (record, frames), seconds, _ = timed(read, "cpu")
        if frames is None:
            raise RunFailed(f"{record['video_id']}: {record['error_class']}: {record['error_message']}")
        return Decoded(record, frames, seconds)

    def encoder(self, evidence: frozenset[str]) -> VideoEncoder:
        """Return an encoder that gives this evidence besides the tokens."""
        setup = self._request.encode_setup(self._runtime.device, self._runtime.dtype_name)
        asked = {name: where for name, where in setup.evidence.items() if name in evidence}
        return VideoEncoder(replace(setup, evidence=asked), self.tower)

    def encoded(self, decoded: Decoded, evidence: frozenset[str]) -> Encoded:
        """Encode a decoded video with this evidence."""
        encoder, record = self.encoder(evidence), decoded.record
        tokens, seconds, peak = timed(lambda: encoder.encoded(decoded.frames), self._runtime.device)
        n_frames, per_frame, _ = tokens.tokens.shape
        visual = Visual(
            tokens=tokens.tokens.flatten(0, 1),
            index=torch.arange(n_frames * per_frame, device="cpu"),
            n_frames=n_frames,
            tokens_per_frame=per_frame,
            extra=self.tower.model_extra(without_pixels(record)),
            deepstack=tuple(level.flatten(0, 1) for level in tokens.deepstack),
            newline=self._newline(),
            evidence={
                name: values if is_per_frame(name) else values.flatten(0, 1) for name, values in tokens.evidence.items()
            },
            frame_indices=record["frame_indices"],
            fps=record["fps"],
        )
        return Encoded(decoded, tokens, visual, seconds, peak)


class Answers:
    """The language model of a job, which answers questions about tokens."""

    def __init__(self, job: Job) -> None:
        self._job, self._device = job, job.runtime.device
        self.llm: LanguageModel = load_language_model(job.request.source, job.runtime)
        # Every answer has its full length: random weights, or another method, would end some sooner.
        self.llm.model.generation_config.eos_token_id = None
        self._embedders = Embedders(self.llm, self._device, [arm.late for arm in job.arms if arm.late is not None])
        self._how = Decoding(max_new_tokens=job.max_new_tokens)

    def chosen(self, arm: Arm, visual: Visual, number: int) -> Timed[tuple[Visual, PrunedTokens | None]]:
        """Select the tokens that an arm keeps before they go into a prompt, timed.

        The PrunedTokens are None where the arm keeps all tokens.
        """
        late = arm.late

        def choose() -> tuple[Visual, PrunedTokens | None]:
            if late is None or late.inside is not None:
                return replace(visual, evidence={}), None
            pruned = late.select(visual, self._device, self._embedders.embedding(late, _text(number)))
            return late.kept(visual, pruned, own_order=False), pruned

        return timed(choose, self._device)

    def asked(self, arm: Arm, visual: Visual, number: int) -> Sample:
        """Answer one question about visual tokens and return its times and counts.

        Raise UsageError if the prompt is too long.
        """
        inside = None if arm.late is None else arm.late.inside
        prompt, prompt_s, _ = timed(lambda: self._job.builder.build(_text(number), [visual]), "cpu")
        if prompt.extent + self._how.max_new_tokens > self.llm.context_length:
            raise UsageError(
                f"a prompt of {prompt.extent} tokens and its answer do not fit into the model's context of "
                f"{self.llm.context_length}: take fewer --num-frames"
            )
        (answer,), llm_s, peak = timed(lambda: self.llm.generate([prompt], [self._how], inside=inside), self._device)
        n_visual = len(visual.index)
        layer, dropped = arm.dropped_inside(n_visual)
        return Sample(
            question=number,
            visual_tokens=n_visual - dropped,
            prompt_tokens=len(prompt),
            kv_bytes=self._job.kv.n_bytes(len(prompt), layer=layer, kept=len(prompt) - dropped),
            prompt_s=prompt_s,
            llm_s=llm_s,
            prefill_s=answer.prefill_s,
            token_decode_s=answer.decode_s,
            peak_bytes=peak,
            answer=answer.token_ids,
        )


def _text(number: int) -> str:
    """Return the text of question ``number``."""
    return _TEXT.format(number=number)
