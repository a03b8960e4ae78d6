"""What answering costs: every way in a process of its own, on the same questions about the same videos."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, prompt_builder
from pipeline import TokenCache
from pipeline.errors import RunFailed
from pipeline.generate.engines import BATCH_SIZES, TRANSFORMERS, VLLM, Engine, EngineSetup, load_engine
from pipeline.generate.engines.cached_rows import read_outline
from pipeline.generate.engines.vllm import VllmEngine, check_installed
from pipeline.generate.held_videos import HeldVideos
from pipeline.rows import JsonObject

_BATCH = BATCH_SIZES[TRANSFORMERS]
#: Ways by which vLLM prunes the tokens of videos itself -> its ``video_pruning_method``.
RIVALS = {"online-vllm-evs": "evs", "online-vllm-vidcom2": "vidcom2"}


@dataclass(frozen=True)
class Job:
    """The work of the benchmark: the model, the cache, and the ratios and numbers of questions a video to try.

    Pickles.
    """

    model: str
    cache: str
    num_frames: int
    ratios: tuple[float, ...]
    questions: tuple[int, ...]
    max_new_tokens: int
    repeats: int


@dataclass(frozen=True)
class Measured:
    """The median measurements of one way, ratio and number of questions a video.

    Attributes:
        requests_per_s: answered, all of them given at once; reading tokens (or decoding and encoding videos) included.
            None where there is no such way.
        first_token_s: until half of the requests had their first token; None where a way does not say.
        reused: share of the prompts' tokens that the prefix cache had; None likewise.
        visual_tokens: in a prompt, on average.
        peak_mb: highest resident memory of the process, with the model.
        gpu_mb: highest of torch's GPU memory; None without a GPU.
        note: why there are no figures.
    """

    mode: str
    retention_ratio: float
    questions: int
    requests: int
    requests_per_s: float | None
    first_token_s: float | None
    reused: float | None
    visual_tokens: float | None
    peak_mb: float | None
    gpu_mb: float | None
    note: str = ""


def device() -> str:
    """Return the device that answers are computed on, "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check(modes: Sequence[str]) -> None:
    """Raise UsageError where vLLM is asked for and missing."""
    if any(VLLM in mode for mode in modes):
        check_installed("jobs.benchmark serving")


def make_cache(folder: Path, model: str, num_frames: int) -> str:
    """Make a cache of the sample clips with every token in GSTEP's order, so of every ratio. Raises RunFailed."""
    command = [sys.executable, "-m", "jobs.prune", "sample", "--out", str(folder), "--model", model]
    command += ["--retention-ratio", "1.0", "--num-frames", str(num_frames)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunFailed(f"jobs.prune: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return str(folder)


def measure(mode: str, job: Job) -> list[Measured]:
    """Measure one way of answering, in a process of its own for each engine. Raises RunFailed where it fails.

    A method of vLLM's own that prunes videos needs an engine for each ratio; a model that it is not for has no figures.
    """
    if mode not in RIVALS:
        return _in_child(mode, job)
    found: list[Measured] = []
    for ratio in (ratio for ratio in job.ratios if ratio < 1.0):
        try:
            found += _in_child(mode, replace(job, ratios=(ratio,)))
        except RunFailed as error:
            note = str(error).splitlines()[0][:300]
            found += [Measured(mode, ratio, number, 0, *(None,) * 6, note=note) for number in job.questions]
    return found


def _in_child(mode: str, job: Job) -> list[Measured]:
    """Measure in a child process, whose memory ends with it. Raises RunFailed where it fails."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(mode, job, theirs))
    child.start()
    theirs.close()
    try:
        found: list[Measured] | str = ours.recv()
    except EOFError:
        child.join()
        found = f"the process died (exit code {child.exitcode})"
    child.join()
    if isinstance(found, str):
        raise RunFailed(f"{mode}: {found}")
    return found


def _child(mode: str, job: Job, pipe: Connection) -> None:
    """Measure in the child process, and send the results or the error's text through the pipe."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        pipe.send(list(_online(mode, job) if mode.startswith("online") else _cached(mode, job)))
    except Exception as error:  # noqa: BLE001 - the parent says it
        pipe.send(f"{type(error).__name__}: {error}")


def _cached(mode: str, job: Job) -> Iterator[Measured]:
    """Answer from the cache with an engine of this package, yielding one result a ratio and number of questions."""
    source, runtime = ModelSource.resolve(job.model), choose_runtime()
    cache = TokenCache(job.cache)
    name = mode.removeprefix("cached-")
    read_by = cache if name == VLLM else None  # vLLM's workers read it themselves
    engine = load_engine(EngineSetup(name, largest_video=cache.most_tokens + 1, cache=read_by), source, runtime)
    builder = prompt_builder(source)
    how = Decoding(max_new_tokens=job.max_new_tokens)
    for ratio in job.ratios:
        for questions in job.questions:
            sizes: list[int] = []

            def ask(ratio: float = ratio, questions: int = questions, sizes: list[int] = sizes) -> float | None:
                held = HeldVideos(cache, ratio, outline=read_outline if engine.reads_cache else None)
                prompts = [
                    builder.build(text, [held.get(video_id).visual])
                    for video_id in cache.video_ids
                    for text in _texts(questions)
                ]
                sizes.extend(builder.n_visual(prompt.visuals) for prompt in prompts)
                if isinstance(engine, VllmEngine):
                    engine.forget()
                    engine.generate(prompts, [how] * len(prompts))
                    return median(engine.first_token_s)
                for start in range(0, len(prompts), _BATCH):
                    part = prompts[start : start + _BATCH]
                    engine.generate(part, [how] * len(part))
                return None

            yield _measured(mode, ratio, questions, len(cache) * questions, job, ask, engine, sizes)


def _online(mode: str, job: Job) -> Iterator[Measured]:
    """Answer from the videos with vLLM's own model and video loader, which decode and encode every video.

    A rival prunes their tokens by vLLM's own method, to the first ratio.
    """
    from gstep.serving.options import prepare_process  # noqa: PLC0415

    prepare_process(device(), 1)
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - tens of seconds to import

    runtime, (name, revision) = choose_runtime(), ModelSource.resolve(job.model).pretrained()
    cache = TokenCache(job.cache)
    files = [Path(cache.metadata(video_id)["uri"]).resolve() for video_id in cache]
    root = os.path.commonpath([str(file.parent) for file in files])
    ratio = job.ratios[0] if mode in RIVALS else 1.0
    pruned = {"video_pruning_method": RIVALS[mode], "video_pruning_rate": 1.0 - ratio} if mode in RIVALS else {}
    llm = LLM(
        model=name,
        revision=revision,
        dtype=runtime.dtype_name,
        limit_mm_per_prompt={"image": 0, "video": 1},
        allowed_local_media_path=root,
        media_io_kwargs={"video": {"num_frames": job.num_frames}},
        max_model_len=-1,
        disable_log_stats=False,
        enforce_eager=runtime.device == "cpu",
        **pruned,
    )
    params = SamplingParams(max_tokens=job.max_new_tokens, temperature=0.0)
    for questions in job.questions:
        messages = [_message(file, text) for file in files for text in _texts(questions)]
        reuse = _Reuse()

        def ask(messages: list[Any] = messages, reuse: _Reuse = reuse) -> float | None:
            llm.reset_prefix_cache()
            llm.llm_engine.reset_mm_cache()
            llm.llm_engine.reset_encoder_cache()
            outputs = llm.chat(messages, params, use_tqdm=False)
            reuse.add(outputs)
            return float(median(output.metrics.first_token_latency for output in outputs))

        yield _measured(mode, ratio, questions, len(messages), job, ask, reuse, [])


def _message(file: Path, text: str) -> list[JsonObject]:
    """Return a chat message with a video and a question."""
    video: JsonObject = {"type": "video_url", "video_url": {"url": file.as_uri()}}
    return [{"role": "user", "content": [video, {"type": "text", "text": text}]}]


def _texts(count: int) -> list[str]:
    """Return ``count`` different question texts."""
    return [f"Question {number}: what happens in this video, and why?" for number in range(count)]


class _Reuse:
    """A counter of prompt tokens, and of those that came from the prefix cache."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reused_tokens = 0

    def add(self, outputs: Sequence[Any]) -> None:
        """Count the prompt tokens of these outputs, and those that were reused."""
        self.prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        self.reused_tokens += sum(output.num_cached_tokens or 0 for output in outputs)


def _measured(
    mode: str,
    ratio: float,
    questions: int,
    requests: int,
    job: Job,
    ask: Callable[[], float | None],
    counted: _Reuse | Engine,
    sizes: list[int],
) -> Measured:
    """Time ``ask``, which sends all ``requests``, ``job.repeats`` times after a call that does not count.

    ``ask`` returns the seconds to the first token, or None; ``counted`` keeps the counts of prompt tokens and of reused
    ones; ``sizes`` are the visual tokens of each video.
    """
    ask()  # what is loaded and compiled on first use does not count
    before = getattr(counted, "prompt_tokens", 0), getattr(counted, "reused_tokens", 0)
    seconds, firsts = [], []
    for _ in range(job.repeats):
        started = time.perf_counter()
        first = ask()
        seconds.append(time.perf_counter() - started)
        firsts += [] if first is None else [first]
    asked = getattr(counted, "prompt_tokens", 0) - before[0]
    return Measured(
        mode=mode,
        retention_ratio=ratio,
        questions=questions,
        requests=requests,
        requests_per_s=requests / median(seconds),
        first_token_s=median(firsts) if firsts else None,
        reused=(getattr(counted, "reused_tokens", 0) - before[1]) / asked if asked else None,
        visual_tokens=sum(sizes) / len(sizes) if sizes else None,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        gpu_mb=torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None,
    )


def as_table(found: Sequence[Measured], title: str) -> Table:
    """Lay out a row a measurement; ``times`` is the speed-up over vLLM on videos with as many questions a video."""
    table = Table(title=title, title_justify="left")
    for name in ("way", "retention", "questions a video", "visual tokens", "requests/s", "times", "first token s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name in ("reused", "peak MB", "GPU MB"):
        table.add_column(name, justify="right")
    online = {one.questions: one.requests_per_s for one in found if one.mode == "online-vllm"}
    for one in found:
        speed, base = one.requests_per_s, online.get(one.questions)
        table.add_row(
            one.mode,
            f"{one.retention_ratio:.0%}",
            str(one.questions),
            _shown(one.visual_tokens, ".0f"),
            _shown(speed, ".2f"),
            _shown(speed / base if speed and base else None, ".1f"),
            _shown(one.first_token_s, ".3f"),
            _shown(one.reused, ".0%"),
            _shown(one.peak_mb, ".0f"),
            _shown(one.gpu_mb, ".0f"),
        )
    table.caption = "\n".join(sorted({f"{one.mode}: {one.note}" for one in found if one.note})) or None
    return table


def as_record(found: Sequence[Measured], job: Job, *, machine: dict[str, str | int]) -> JsonObject:
    """Return the benchmark's JSON document."""
    return {"machine": machine, "job": asdict(job), "measured": [asdict(one) for one in found]}


def _shown(value: float | None, form: str) -> str:
    """Format a value, "" for None."""
    return "" if value is None else format(value, form)
