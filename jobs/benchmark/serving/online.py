"""Answers from the videos: vLLM's own model and video loader, which decode and encode every video."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Protocol

from gstep.backbones import ModelSource, choose_runtime
from jobs.benchmark.serving.ways import Ask, Job, Pass, SentBytes, questions_of
from pipeline import TokenCache
from pipeline.rows import JsonObject

#: Ways -> the method by which vLLM prunes the tokens of videos itself (its ``video_pruning_method``); "" for none.
ONLINE = {"online-vllm": "", "online-vllm-evs": "evs", "online-vllm-vidcom2": "vidcom2"}
_SYSTEM: list[JsonObject] = [{"role": "system", "content": "You are a helpful assistant that watches videos."}]


class ModelRunner(Protocol):
    """The part of vLLM's model runner that says whether it prunes."""

    is_multimodal_pruning_enabled: bool


class PruningWorker:
    """The methods that workers of vLLM get (``worker_extension_cls``): on CPUs vLLM 0.32 forgets to turn pruning on.

    ``GPUModelRunner.load_model`` does, ``CPUModelRunner.load_model`` does not, and the first video ends the engine.
    """

    model_runner: ModelRunner

    def turn_on_pruning(self) -> None:
        """Turn on the pruning that the engine was configured for."""
        self.model_runner.is_multimodal_pruning_enabled = True


class OnlineWay:
    """The way of answering by vLLM alone, of all tokens or of a ratio of them that it keeps by a method of its own."""

    def __init__(self, mode: str, job: Job) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - tens of seconds to import

        runtime, (name, revision) = choose_runtime(), ModelSource.resolve(job.model).pretrained()
        cache, method = TokenCache(job.cache), ONLINE[mode]
        self._files = [Path(cache.metadata(video_id)["uri"]).resolve() for video_id in cache]
        root = os.path.commonpath([str(file.parent) for file in self._files])
        pruned = {"video_pruning_method": method, "video_pruning_rate": 1.0 - job.ratios[0]} if method else {}
        # The first marker of a Qwen3-VL prompt stands before all frames, and vLLM 0.32 takes it for the first frame's:
        # where no text is in front of it, a pruned video has places before the prompt, and ends the engine.
        self._system = _SYSTEM if method else []
        self._llm = LLM(
            model=name,
            revision=revision,
            dtype=runtime.dtype_name,
            limit_mm_per_prompt={"image": 0, "video": 1},
            allowed_local_media_path=root,
            # This loader takes as many frames as it is told; those of the Qwen families take two a second.
            media_io_kwargs={"video": {"num_frames": job.num_frames, "video_backend": "opencv"}},
            max_model_len=-1,
            disable_log_stats=False,
            enforce_eager=runtime.device == "cpu",
            worker_extension_cls=f"{PruningWorker.__module__}.{PruningWorker.__name__}",
            **pruned,
        )
        if method and runtime.device == "cpu":
            self._llm.collective_rpc(PruningWorker.turn_on_pruning.__name__)
        self._video_token = int(self._llm.model_config.hf_config.video_token_id)
        self._params = SamplingParams(max_tokens=job.max_new_tokens, temperature=0.0)
        self._sent = SentBytes(self._llm.llm_engine.engine_core)

    def fresh(self, ratio: float, questions: int) -> Ask:
        """Return what asks so many questions about every video, once all caches of vLLM have been emptied."""
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        texts = questions_of(questions)
        return partial(self._ask, [[*self._system, _message(file, text)] for file in self._files for text in texts])

    def close(self) -> None:
        """End the engine and its process."""
        self._llm.llm_engine.engine_core.shutdown()

    def _ask(self, messages: list[list[JsonObject]]) -> Pass:
        """Ask all messages at once."""
        started, sent = time.perf_counter(), self._sent.total
        outputs = self._llm.chat(messages, self._params, use_tqdm=False)
        return Pass(
            requests=len(messages),
            seconds=time.perf_counter() - started,
            first_token_s=float(median(output.metrics.first_token_latency for output in outputs)),
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            reused_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            visual_tokens=sum(output.prompt_token_ids.count(self._video_token) for output in outputs) / len(outputs),
            sent_bytes=self._sent.total - sent,
        )


def _message(file: Path, text: str) -> JsonObject:
    """Return a chat message with a video and a question."""
    video: JsonObject = {"type": "video_url", "video_url": {"url": file.as_uri()}}
    return {"role": "user", "content": [video, {"type": "text", "text": text}]}
