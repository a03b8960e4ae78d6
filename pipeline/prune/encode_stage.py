"""The GPU actor: frames -> visual tokens -> the kept tokens. One video's fault becomes its error row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gstep import PrunedTokens, VisualTokens, make_pruner
from gstep.backbones import ModelSource, SampledVideo, choose_runtime, family_of
from pipeline.errors import VideoFault
from pipeline.execution.gpu_fault import exit_if_poisoned
from pipeline.execution.heartbeat import Beat
from pipeline.rows import (
    ENCODED,
    Record,
    evidence_widths,
    failed,
    one_row,
    payload,
    pruned_arrays,
    pruned_columns,
    records,
)

_SAMPLED = ("height", "width", "timestamps", "start_s", "fps", "clip_frames")


@dataclass(frozen=True)
class EncodeSetup:
    """What an encoder needs to know; it travels to every actor."""

    source: ModelSource
    pruner: str
    retention_ratio: float
    seed: int = 0
    pruner_params: dict[str, Any] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)  # to be stored, name -> where in the encoder
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"

    def bytes_per_video(self, n_frames: int, height: int, width: int) -> int:
        """About what the kept tokens of [n_frames, height, width] pixels take as they are stored."""
        whole = family_of(self.source).token_bytes(n_frames, height, width, tuple(self.evidence))
        return round(self.retention_ratio * whole)


class Encoder:
    """Holds one vision tower; never the LLM."""

    def __init__(self, setup: EncodeSetup, pulse: Any = None) -> None:
        self._setup = setup
        self._beat = Beat("encode", pulse)
        self._stage = "encode"  # what a video is in at this moment: "encode" or "prune"
        self._runtime = choose_runtime(setup.device, setup.dtype, setup.attn)
        self._pruner = make_pruner(setup.pruner, **setup.pruner_params)
        with self._beat.busy("the model, being loaded"):
            self._backbone = family_of(setup.source).load(self._runtime)
        self._provenance = json.dumps(self._runtime.describe())

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for row, record in enumerate(records(batch)):
            with self._beat.holding(record["video_id"]):
                if record["status"] != "ok":
                    encoded = one_row(ENCODED, record)
                else:
                    encoded = self._encode_row(record, payload(batch, "frames", row, np.uint8))
            yield encoded

    def _encode_row(self, record: Record, frames: np.ndarray | None) -> pa.Table:
        """One video; the error boundary of this stage."""
        started = time.perf_counter()
        self._stage = "encode"
        try:
            assert frames is not None
            shape = (len(record["frame_indices"]), record["height"], record["width"], 3)
            pruned, visual, seconds = self._encode_and_prune(frames.reshape(shape), record)
            extra = self._backbone.model_extra(_without_pixels(record))
            columns = {**pruned_columns(pruned, record), "runtime": self._provenance, "model_extra": json.dumps(extra)}
            evidence = {name: visual.evidence[name] for name in self._setup.evidence}
            arrays = pruned_arrays(pruned, visual.deepstack, list(evidence.values()))
            return one_row(ENCODED, {**record, **seconds, **columns, **evidence_widths(evidence)}, arrays)
        except VideoFault as error:
            fault = error.with_traceback(None)  # which holds the frames of the video
        except torch.OutOfMemoryError as error:
            fault = VideoFault("out-of-memory", str(error), stage=self._stage)
        except Exception as error:  # noqa: BLE001 - whatever one video provokes must not cost its neighbours
            exit_if_poisoned(record["video_id"], error)
            fault = VideoFault("internal", f"{type(error).__name__}: {error}", stage=self._stage)
        return one_row(ENCODED, {**failed(record, fault), "encode_s": time.perf_counter() - started})

    def _encode_and_prune(
        self, frames: np.ndarray, record: Record
    ) -> tuple[PrunedTokens, VisualTokens, dict[str, float]]:
        """The kept tokens, all of them in storage precision with their evidence, and what both steps took."""
        started = time.perf_counter()
        visual = self._backbone.encode(frames, {**self._pruner.sources, **self._setup.evidence})
        self._wait()
        encoded = time.perf_counter()
        # Storage precision first, then prune: a selection can be derived again from what is stored.
        tokens_TND, *deepstack = (level.to(torch.bfloat16) for level in (visual.tokens, *visual.deepstack))
        record |= {"n_frames": tokens_TND.shape[0], "tokens_per_frame": tokens_TND.shape[1]}
        for level, values_TND in enumerate(deepstack):  # of the tokens themselves pruning finds it out
            if not values_TND.isfinite().all():
                raise VideoFault("internal", f"deepstack level {level} has values that are not finite", stage="encode")
        for name in self._setup.evidence:
            if not visual.evidence[name].isfinite().all():
                raise VideoFault("internal", f"the evidence {name} has values that are not finite", stage="encode")
        self._stage = "prune"
        try:
            visual = replace(visual, tokens=tokens_TND, deepstack=tuple(deepstack))
            pruned = self._pruner.prune(visual, self._setup.retention_ratio, seed=self._setup.seed)
        except ValueError as error:
            raise VideoFault("internal", f"the tokens cannot be pruned: {error}", stage="prune") from error
        self._wait()
        seconds = {"encode_s": encoded - started, "prune_s": time.perf_counter() - encoded}
        return pruned, visual, seconds

    def _wait(self) -> None:
        """Kernels run behind the host's back; a stage's seconds must hold its own."""
        if self._runtime.device.startswith("cuda"):
            torch.cuda.synchronize()


def _without_pixels(record: Record) -> SampledVideo:
    return SampledVideo(**{name: record[name] for name in _SAMPLED})
