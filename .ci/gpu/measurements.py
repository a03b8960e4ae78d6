"""The measurements, in order of value; measurements that ``jobs.benchmark`` has are called, not repeated."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import inputs
import loops
import pyarrow.parquet as pq
import pytest
import torch
from bench import Bench, run_command
from torch.nn.functional import cosine_similarity, interpolate
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from gstep.backbones import ModelSource, choose_runtime
from jobs import prune
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark import generic, selection
from jobs.benchmark.shared import format_machine, time_call
from jobs.benchmark.tokens import make_structured_tokens
from pipeline.cache.writer import VideoItem
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.rows import VideoRecord
from tests.jobs.poison import BREAKS_THE_GPU

TESTS = Path(__file__).resolve().parents[2] / "tests"
RATIO = 0.25
FPS = 4
GIB = 2**30
ENCODER_THREADS = 3  # as in a run: one video's frames arrive, another is encoded, a third is pruned
POISON_NEIGHBORS = 11
_ENDS = r"(\d+)(?:/\d+)? (passed|failed|skipped|errors?|tests collected)"  # in the last line of pytest


def make_inputs(bench: Bench) -> None:
    """Write all models, clips and manifests to the folder ``work``, in parallel processes, and report their number.

    A model's folder appears when it is complete, as does the folder ``clips``.
    """
    clips = bench.work / "clips.part"
    clips.mkdir()
    names = [f"{number:03}.mp4" for number in range(bench.clips)]
    poison = "poison.mp4"
    lengths = {**dict.fromkeys(names, bench.clip_s), poison: BREAKS_THE_GPU / FPS}
    with ProcessPoolExecutor(2 if bench.rehearse else 12) as pool:
        write_model = partial(pool.submit, inputs.write_model, is_tiny=bench.rehearse)
        futures = [write_model(bench.work / name, name) for name in inputs.MODELS]
        futures.append(write_model(bench.work / "table3", "llava", language=inputs.LANGUAGE))
        for seed, (name, seconds) in enumerate(lengths.items()):
            futures.append(pool.submit(inputs.write_clip, clips / name, seconds, seed, bench.size))
        for future in futures:
            future.result()
    inputs.write_manifest(clips / "many.jsonl", names, bench.copies)
    inputs.write_manifest(clips / "poison.jsonl", [*names[:3], poison, *names[3:POISON_NEIGHBORS]])
    clips.rename(bench.work / "clips")
    bench.say("models and clips", len(futures))


def measure_machine(bench: Bench) -> None:
    """Report the machine, its packages, and the device's speed in bfloat16 matrix products and copies."""
    bench.say("machine", f"{format_machine(bench.device)}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    bench.say("packages", ", ".join(f"{name} {version(name)}" for name in ("triton", "transformers", "ray", "av")))
    side, n_bytes = (256, 2**22) if bench.rehearse else (8192, 2**31)
    left, right = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.empty(n_bytes, dtype=torch.uint8, device=bench.device) for _ in range(2))
    product_s = Timer("left @ right", globals=locals()).timeit(10).median
    copy_s = Timer("target.copy_(source)", globals=locals()).timeit(10).median
    bench.say("products in bfloat16", 2 * side**3 / product_s / 1e12, "TFLOP/s")
    bench.say("copies, read and written", 2 * n_bytes / copy_s / 1e9, "GB/s")


def load_encoder(bench: Bench, model: str, **settings: Any) -> tuple[VideoEncoder, VideoRecord, torch.Tensor]:
    """Wait for a model to be written, and load its encoder.

    Returns:
        The encoder, and the record and frames [T,h,w,3] uint8 of a smooth random video.
    """
    source = ModelSource.resolve(bench.wait_for(model))
    encoder = VideoEncoder(EncodeSetup(source, "gstep", RATIO, device=bench.device, **settings))
    h, w = encoder.backbone.preprocessor.target_size(bench.frames, *bench.size[::-1])
    noise = torch.rand(bench.frames, 3, 36, 64, generator=torch.Generator().manual_seed(0))
    smooth = interpolate(noise, (h, w), mode="bicubic").clamp(0, 1)
    numbers = range(bench.frames)
    times: VideoRecord = {"frame_indices": [*numbers], "timestamps": [number / FPS for number in numbers]}
    record: VideoRecord = {"video_id": "v", "status": "ok", "height": h, "width": w, "fps": 30.0, "clip_frames": 300}
    return encoder, {**record, **times}, (255 * smooth.permute(0, 2, 3, 1)).to(torch.uint8).contiguous()


def measure_tower(bench: Bench, model: str) -> None:
    """Time a model's encoder as a run uses it, list its five longest kernels, and compare its tokens with a CPU's."""
    encoder, record, frames = load_encoder(bench, model)
    backbone = encoder.backbone
    on_device = frames.to(bench.device)
    rows = [encoder.encode_video_alone(record, frames.numpy()).record for _ in range(1 + bench.repeats)][1:]
    encode_s, prune_s = (statistics.median(row[step] for row in rows) for step in ("encode_s", "prune_s"))
    work = backbone.family.flops(*frames.shape[:3]) / 1e12
    bench.say("tokens", rows[0]["n_total"])
    bench.say("form of the tower", backbone.form)
    bench.say("encoding", 1e3 * encode_s, "ms a video")
    bench.say("work", work, "TFLOP a video")
    bench.say("speed", work / encode_s, "TFLOP/s")
    bench.say("pruning by itself", 1e3 * prune_s, "ms a video")
    videos = ENCODER_THREADS * bench.repeats
    with ThreadPoolExecutor(ENCODER_THREADS) as pool:
        encode_all = partial(pool.map, partial(encoder.encode_video_alone, record), [frames.numpy()] * videos)
        bench.say("all, videos in parallel", 1e3 * time_call(lambda: [*encode_all()])[0] / videos, "ms a video")
    with profile(activities=[ProfilerActivity.CPU if bench.rehearse else ProfilerActivity.CUDA]) as profiler:
        backbone.encode(on_device).tokens.cpu()
    kind = "cpu" if bench.rehearse else "device"
    events = [(event.key, event.count, getattr(event, f"self_{kind}_time_total")) for event in profiler.key_averages()]
    spans = [event for event in events if event[2]]  # others only launch
    bench.say("kernels", sum(count for _, count, _ in spans))
    for name, count, us in sorted(spans, key=lambda span: -span[2])[:5]:
        bench.say(f"{count} x {name[:60]}", us / 1e3, "ms a video")
    torch.set_num_threads(1 if bench.rehearse else os.cpu_count() or 1)
    exact_MD = backbone.family.load(choose_runtime("cpu", "float32")).encode(frames[:2]).tokens.flatten(0, 1)
    tokens_MD = backbone.encode(on_device[:2]).tokens.float().cpu().flatten(0, 1)
    mean_D = exact_MD.mean(0)  # common to all tokens: it would hide differences
    min_cosine = cosine_similarity(tokens_MD - mean_D, exact_MD - mean_D, dim=-1).min().item()
    bench.say("least cosine with the centered tokens of a CPU in float32", min_cosine)


def run_prune(bench: Bench, manifest: str, model: object, *flags: object) -> tuple[dict[str, Any], Path]:
    """Run ``jobs.prune`` on a manifest of clips, and report the numbers of videos and failures.

    Returns:
        The command's JSON document and the path of the cache.
    """
    videos = bench.wait_for("clips") / manifest
    out = bench.work / f"cache-{bench.name}"
    document = run_command(prune.main, videos, "--out", out, "--model", model, "--device", bench.device, *flags)
    bench.say("videos", document["n_ok"])
    bench.say("failures", json.dumps(document["failures"]))
    return document, out


def measure_job(bench: Bench) -> None:
    """Run ``jobs.prune`` on many clips, for comparison with ``loop`` and ``ray``, and report speeds and stage times."""
    sizes = ("--num-frames", bench.frames, "--videos-per-shard", min(8, bench.clips // 2))
    document, cache = run_prune(bench, "many.jsonl", bench.wait_for("llava"), *sizes)
    bench.say("speed, start included", document["n_ok"] / document["wall_s"], "videos/s")
    bench.say("encoder busy, start included", 100 * document["encoder_busy"], "%")
    for stage, seconds in document["seconds"].items():
        bench.say(stage, 1e3 * seconds / document["n_ok"], "ms a video")
    shards = (cache / "videos").glob("*.parquet")
    (first_s, first), *commits = sorted((path.stat().st_mtime, pq.read_metadata(path).num_rows) for path in shards)
    later = document["n_ok"] - first
    bench.say("speed from the first commit to the last", later / (commits[-1][0] - first_s), "videos/s")


def measure_loop(bench: Bench, run: Callable[..., None], n_videos: int) -> None:
    """Run what a user would write instead of ``jobs.prune`` on the first ``n_videos`` of the same videos.

    Reports the videos and, without the start, the videos per second.

    Args:
        run: ``loops.run_loader`` or ``loops.run_ray_data``.
    """
    folder = str(bench.wait_for("llava"))
    out = bench.work / f"kept-{bench.name}"
    clips = bench.wait_for("clips")
    rows = [json.loads(line) for line in (clips / "many.jsonl").read_text().splitlines()[:n_videos]]
    out.mkdir()
    run([{**row, "uri": str(clips / row["uri"])} for row in rows], folder, out, bench.frames, bench.device)
    times = sorted(pq.read_table(out)["encoded_at"].to_pylist())
    bench.say("videos", len(times))
    bench.say("speed from the first video to the last", (len(times) - 1) / (times[-1] - times[0]), "videos/s")


def measure_answers(bench: Bench) -> None:
    """Measure the paper's Table 3 with ``jobs.benchmark efficiency``, for a language model of published size."""
    fixed = ("efficiency", "--model", bench.wait_for("table3"), "--videos", bench.wait_for("clips") / "000.mp4")
    flags = ("--random-weights", "--num-frames", bench.frames, "--device", bench.device)
    sizes = "fastv --retention-ratio 0.25 0.15 --max-new-tokens 32 --repeats 3"
    if bench.rehearse:
        sizes = "fastv,K=1 --retention-ratio 0.25 --max-new-tokens 2 --repeats 1"
    scales = {"_s": (1e3, "ms"), "_bytes": (1 / GIB, "GiB")}
    figures = {"online": ("prefill_s", "token_decode_s", "total_s", "kv_bytes", "peak_bytes")}
    figures["cached"] = ("total_s", "peak_bytes")
    for row in run_command(benchmark.main, *fixed, *flags, "--method", "gstep", *sizes.split())["rows"]:
        for mode, figure in ((mode, figure) for mode, names in figures.items() for figure in names):
            scale, unit = next(scales[end] for end in scales if figure.endswith(end))
            label = f"{row['method']} {row['retention_ratio']:g}, {mode} {figure.rpartition('_')[0]}"
            bench.say(label, scale * row[mode][figure], unit)


def measure_generic(bench: Bench, models: tuple[str, ...]) -> None:
    """Compare a family's own code with the family generic on one clip, as ``jobs.benchmark generic`` does."""
    clip = bench.wait_for("clips") / "000.mp4"
    runtime = choose_runtime(bench.device)
    for model, folder in ((model, bench.wait_for(model)) for model in models):
        sources = {way: ModelSource.resolve(folder, family=way) for way in (None, generic.GENERIC)}
        ways = {generic.FAST: sources[None], generic.GENERIC: sources[generic.GENERIC]}
        for cost in generic.measure(ways, bench.size[1], clip, bench.frames, runtime, bench.repeats):
            for step in ("decode", "copy", "prepare", "encode", "prune"):
                if (seconds := getattr(cost, f"{step}_s")) is not None:
                    bench.say(f"{model}, {cost.way}, {step}", 1e3 * seconds, "ms a video")
            bench.say(f"{model}, {cost.way}, the same tokens both ways", cost.same)


def run_tests(bench: Bench) -> None:
    """Run the tests that need a CUDA device, and report the counts of outcomes; a rehearsal only collects them.

    Raises:
        RuntimeError: the exit code of pytest is not 0.
    """
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "needs_cuda" in path.read_text()]
    how = ("-n", "0", "--collect-only") if bench.rehearse else ("-n", "8")
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", 'skipif(reason="needs a CUDA device")', *how, *files])
    sys.stdout.flush()
    for count, outcome in re.findall(_ENDS, bench.read_last_line(bench.name)):
        bench.say(outcome, int(count))
    if code:
        raise RuntimeError(f"pytest: {bench.read_last_line(bench.name)}")


def break_gpu_context(bench: Bench) -> None:
    """Run ``jobs.prune`` with a method that breaks the GPU's context at one video, which must be the only failure.

    Raises:
        RuntimeError: another video fails, or the poisoned one does not fail as a crash.
    """
    bench.say(
        "what breaks", "a CPU only raises the error" if bench.rehearse else "the context, by an index out of range"
    )
    flags = ("--pruner", "tests.jobs.poison:Poison", "--fps", FPS, "--max-frames", 32)
    document, _ = run_prune(bench, "poison.jsonl", "tiny", *flags)
    if (document["n_ok"], document["failures"]) != (min(bench.clips, POISON_NEIGHBORS), {"crash": 1}):
        raise RuntimeError("the poisoned video was to crash, and no other video to fail")


def limit_gpu_memory(bench: Bench) -> None:
    """Encode with too little GPU memory for one pass, and report which tokens stay the same and how passes are split.

    In a rehearsal, an error stands in for the lack of memory.

    Raises:
        RuntimeError: a video's pass, or a pass of four videos, was not split.
    """
    encoder, record, frames = load_encoder(bench, "llava", batch_frames=4 * bench.frames)
    backbone = encoder.backbone
    sizes = list[int]()
    encode_chunk = backbone.encode_chunk
    expected = encoder.encode_video_alone(record, frames.numpy()).kept.index.tolist()

    def encode_some(chunk: torch.Tensor, evidence: dict[str, str]) -> object:
        if bench.rehearse and len(chunk) > bench.frames // 2:
            raise torch.OutOfMemoryError("rehearsed")
        tokens = encode_chunk(chunk, evidence)
        sizes.append(len(chunk))
        return tokens

    if bench.rehearse:
        backbone.on_cpu = False  # a CPU would encode single frames
        bench.say("memory", "a CPU only raises the error")
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_allocated()
        backbone.encode(frames.to(bench.device))
        pass_bytes = torch.cuda.max_memory_allocated() - before_bytes
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((before_bytes + 0.62 * pass_bytes) / torch.cuda.mem_get_info()[1])
        bench.say("memory", f"limited to 62 % of the {pass_bytes / GIB:.3g} GiB of a pass")
    backbone.encode_chunk = encode_some
    index = encoder.encode_video_alone(record, frames.numpy()).kept.index.tolist()
    bench.say("frames of each pass", sizes)
    bench.say("kept tokens that are kept without the limit", 100 * len({*index} & {*expected}) / len(expected), "%")
    split = encoder.encode_together([VideoItem(record, frames=frames.numpy())] * 4)
    bench.say("videos to encode alone, of 4 in a pass", split.count(None))
    if len(sizes) < 2 or split.count(None) < 4:
        raise RuntimeError("the memory was not short, or the passes did not get smaller")


def measure_selection(bench: Bench) -> None:
    """Time the selection, the paper's loop and VidCom2, and report the share of the loop's tokens that are kept."""
    for shape in ((3, 8, 32),) if bench.rehearse else ((32, 196, 3584), (16, 720, 3584)):
        tokens = make_structured_tokens(*shape).to(bench.device)
        for ratio in (0.25, 0.10):
            times = selection.measure("structured", tokens, ratio, bench.repeats)
            label = f"{times.n_tokens} tokens, {ratio:g}"
            for form in ("loop", "selection", "gstep", "vidcom2"):
                bench.say(f"{label}, {form}", 1e3 * getattr(times, form), "ms")
            bench.say(f"{label}, tokens of the loop that are kept", 100 * times.same, "%")


class Measurement(NamedTuple):
    """A measurement and its time limit in seconds."""

    limit_s: float
    measure: Callable[[Bench], None]


INPUTS = "inputs"  # created while the first measurements run
MEASUREMENTS = {
    INPUTS: Measurement(240, make_inputs),
    "machine": Measurement(30, measure_machine),
    **{model: Measurement(45, partial(measure_tower, model=model)) for model in inputs.MODELS},
    "prune": Measurement(75, measure_job),
    "loop": Measurement(80, partial(measure_loop, run=loops.run_loader, n_videos=100)),
    "table3": Measurement(160, measure_answers),
    "generic": Measurement(150, partial(measure_generic, models=("llava", "qwen3"))),
    "tests": Measurement(125, run_tests),
    "poison": Measurement(100, break_gpu_context),
    "memory": Measurement(100, limit_gpu_memory),
    "selection": Measurement(60, measure_selection),
    "ray": Measurement(80, partial(measure_loop, run=loops.run_ray_data, n_videos=60)),
}
CHECKS = frozenset({"tests", "poison", "memory"})  # these time nothing
