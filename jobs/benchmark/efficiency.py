"""The paper's efficiency figures (Table 3), for answers from the videos and from a cache of their tokens.

Decoding and encoding are measured once per video, repeat and kind of evidence, and count for every online question.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gstep.backbones import ModelSource, StaticParts, choose_runtime, family_of
from gstep.checkpoints.random_weights import has_no_weights
from gstep.evidence import HEAD_SOURCES
from gstep.language import Decoding, Visual, load_language_model, prompt_builder
from jobs.benchmark.shared import (
    add_flag,
    describe_machine,
    find_known_maximum,
    format_machine,
    make_figure_table,
    say,
    time_work,
)
from jobs.command import parse_output_file, share, throttle
from jobs.frame.json_document import CommandResult
from pipeline.cache.header import HEADER, compute_fingerprint, serialize_header
from pipeline.cache.reader import TokenCache
from pipeline.cache.token_shard import TokenShard
from pipeline.cache.writer import VideoItem, commit_records, write_token_shard
from pipeline.errors import RunFailed, UsageError, convert_usage_errors
from pipeline.evaluate.forms import escape_latex
from pipeline.evaluate.tabulate import format_method_title
from pipeline.generate.late_pruning import LatePruning, parse_pruning_grid, resolve_pruning
from pipeline.generate.prompts import TextEmbeddings
from pipeline.inputs.video_list import VideoList
from pipeline.options import ATTN, DEVICES, DTYPES
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_stage import VideoEncoder
from pipeline.prune.recipe import Recipe, list_needed_evidence, resolve_recipe
from pipeline.rows import ManifestRow, TodoRow, VideoRecord
from pipeline.storage.stores import LocalStore

Figures = dict[str, Any]  # figures of a question or of an arm, JSON-able
METHODS = ["fastv", "fastvid", "cdpruner", "vidcom2", "gstep"]  # methods of the paper's Table 3, in its order
FULL = "none"
ONLINE, CACHED = "online", "cached"
MIB, GIB = 2**20, 2**30
_PROGRESS_S = 5.0  # seconds between two lines of progress
_QUESTION = (
    "Question {number}: what happens in this video after the person has looked at the camera?\n"
    "A. They sit down.\nB. They leave the room.\nC. They ride a bike.\nD. Nothing happens.\n"
    "Answer with the option's letter from the given choices directly."
)
#: The printed tables: a line about the table -> its columns, title -> (mode, figure). {memory} is the measured memory.
_TABLES = {
    "online, medians of a question; in % the change to full retention": {
        "visual tokens": (ONLINE, "visual_tokens"),
        "E2E s": (ONLINE, "total_s"),
        "LLM s with tower": (ONLINE, "llm_with_tower_s"),
        "LLM s without tower": (ONLINE, "llm_s"),
        "{memory}": (ONLINE, "peak_bytes"),
        "KV MiB": (ONLINE, "kv_bytes"),
    },
    "parts of it; tokens/s of the prompt, and of the answer after its first token": {
        "read video s": (ONLINE, "video_decode_s"),
        "encode s": (ONLINE, "encode_s"),
        "prune s": (ONLINE, "prune_s"),
        "prompt s": (ONLINE, "prompt_s"),
        "prefill s": (ONLINE, "prefill_s"),
        "prefill tokens/s": (ONLINE, "prefill_rate"),
        "decode s": (ONLINE, "token_decode_s"),
        "decode tokens/s": (ONLINE, "decode_rate"),
    },
    "from a cache of its tokens (no vision tower in memory), seconds to cache a video,\n"
    "and from how many questions about a video on caching takes less time": {
        "online s": (ONLINE, "total_s"),
        "cached s": (CACHED, "total_s"),
        "of it read s": (CACHED, "read_s"),
        "of it LLM s": (CACHED, "llm_s"),
        "read MB": (CACHED, "bytes_read"),
        "{memory}": (CACHED, "peak_bytes"),
        "build s": (ONLINE, "build_s"),
        "break-even": (ONLINE, "break_even"),
    },
}
#: End of a figure's name -> its printed unit and decimals; other figures are whole numbers.
_UNITS = {"_s": (1, 3), "_rate": (1, 1), "peak_bytes": (GIB, 2), "kv_bytes": (MIB, 1), "bytes_read": (10**6, 2)}


@dataclass(frozen=True)
class Arm:
    """A pruning method at a retention ratio.

    Attributes:
        recipe: the recipe of the arm's cache, which has kept tokens. For full retention and for a ``late`` method it
            has all tokens, with the evidence of that method.
        late: the pruning that is done anew for each question; None if tokens are pruned once per video, or not at all.
    """

    method: str
    retention_ratio: float
    recipe: Recipe
    late: LatePruning | None
    store: LocalStore


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    model = (
        "a Hugging Face id or folder; a folder with a config.json and no weights gets random weights. The default is "
        "random and small: its figures compare methods; they are not speeds of a real model"
    )
    add_flag(parser, "--model", "tiny-qwen2-5-vl", model, "MODEL")
    random = "use seeded random weights instead of the model's"
    parser.add_argument("--random-weights", action="store_true", help=random)
    add_flag(parser, "--siglip", None, "for fastvid and cdpruner on LLaVA-OneVision", "MODEL", str)
    methods = "parameters after commas, fastv,K=3; full retention is always measured too"
    add_flag(parser, "--method", METHODS, methods, "METHOD")
    add_flag(parser, "--retention-ratio", [0.25, 0.15], "kept shares; the defaults are the paper's", "R", share)
    add_flag(parser, "--videos", "sample", "the videos, as VIDEOS of jobs.prune", "VIDEOS")
    add_flag(parser, "--num-frames", 32, "frames per video", "T")
    add_flag(parser, "--questions", 1, "questions per video", "Q")
    add_flag(parser, "--max-new-tokens", 16, "exact number of tokens of every answer", "N")
    add_flag(parser, "--device", "auto", "device of the model", choices=DEVICES)
    add_flag(parser, "--dtype", "auto", "auto: bfloat16 on GPUs, else float32", choices=DTYPES)
    add_flag(parser, "--attn", "auto", "attention kernel", choices=ATTN)
    add_flag(parser, "--repeats", 3, "measure N times, and show medians", "N")
    add_flag(parser, "--latex", None, "write the paper's Table 3 there", "FILE", parse_output_file)


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure all methods, write the paper's table to the file of ``--latex``, and return the tables to print.

    Raises:
        UsageError: an option cannot be used, or a prompt does not fit the model.
        RunFailed: a video cannot be decoded.
        VideoFault: a video cannot be encoded or pruned.
    """
    with TemporaryDirectory() as folder:
        bench = EfficiencyRun(arguments, Path(folder), throttle(say, _PROGRESS_S))
        samples = bench.run()
    rows = [summarize_samples(arm, samples) for arm in bench.arms]
    runtime = bench.runtime
    n_tokens, n_videos = rows[0][ONLINE]["visual_tokens"], len(bench.videos)
    title = (
        f"{bench.source.name}{' with random weights' if bench.random else ''} on {format_machine(runtime.device)}, "
        f"{runtime.dtype_name}, attention {runtime.attn_implementation}; {arguments.num_frames} frames, {n_tokens:.0f} "
        f"visual tokens, {arguments.max_new_tokens} new tokens; {n_videos} videos x {arguments.questions} questions x "
        f"{arguments.repeats} repeats"
    )
    memory = "GPU GiB" if runtime.device != "cpu" else "process's GiB"
    tables = []
    for number, (about, columns) in enumerate(_TABLES.items()):
        heads = ["method", "kept", *(head.format(memory=memory) for head in columns)]
        lines = [format_row(row, columns.values(), rows[0] if number == 0 else None) for row in rows]
        tables.append(make_figure_table(f"{title}\n{about}", heads, lines))
        if number == 0 and arguments.latex is not None:
            arguments.latex.write_text(format_latex(heads, lines, f"{title}; {about}"), encoding="utf-8")
    flags = {name: value for name, value in vars(arguments).items() if name not in ("run", "json", "latex")}
    about_run = {
        "machine": describe_machine(runtime.device),
        "runtime": runtime.describe(),
        "random_weights": bench.random,
    }
    record = {"title": title, "memory": memory, **about_run, "arguments": flags, "rows": rows, "samples": samples}
    return CommandResult(0, record, tables)


class EfficiencyRun:
    """One run of the measurement: its arms and videos, its models, and the caches that it makes.

    A sample has the figures of one question in one mode: seconds of each step, 0 for a step that the mode skips, and
    sums. ``llm_s`` is the whole ``generate`` call, ``llm_with_tower_s`` adds encoding and pruning as the paper's
    harness does, and ``total_s`` adds all other steps. ``peak_bytes`` is the peak of torch's memory on a GPU, or of
    this process on a CPU, including weights; None if unknown.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> None:
        """Resolve the model, videos and methods of the arguments, load the models, and begin the arms' caches.

        The end token is removed from the language model's generation config, so that every answer has its full length.

        Args:
            folder: an existing folder for the arms' caches, and for a model with random weights.
            say: prints a line of progress.

        Raises:
            UsageError: an option cannot be used; raised before the models are loaded.
        """
        model = arguments.model
        self._arguments = arguments
        self._say = say
        with convert_usage_errors():
            self.runtime = choose_runtime(arguments.device, arguments.dtype, arguments.attn)
            self.random = arguments.random_weights or has_no_weights(model)
            (folder / "model").mkdir()
            source = ModelSource.random(model, folder / "model") if self.random else ModelSource.resolve(model)
            self.videos: list[ManifestRow] = VideoList.read(arguments.videos).known.to_pylist()
            self.builder = prompt_builder(source)
            self.arms = self._resolve_arms(source, folder)
        self.source, self._device = self.arms[0].recipe.source, self.runtime.device
        say(f"loading {self.source.name}")
        self.tower = family_of(self.source).load(self.runtime)
        self.llm = load_language_model(self.source, self.runtime)
        # Every answer has its full length: random weights, or another method, would end some answers sooner.
        self.llm.model.generation_config.eos_token_id = None
        self._embedders = TextEmbeddings(self.llm, self._device, [arm.late for arm in self.arms if arm.late])
        self._decoding = Decoding(max_new_tokens=arguments.max_new_tokens)
        self._commits = count()
        static = StaticParts(self.tower.hidden_size, self.tower.newline(), self.builder.deepstack_levels)
        for arm in self.arms:
            arm.store.make()
            arm.store.put(HEADER, serialize_header(arm.recipe.header(self.runtime.dtype_name, static)))

    def _resolve_arms(self, source: ModelSource, folder: Path) -> list[Arm]:
        """Resolve full retention, which comes first, and each method at each ratio; an explicit "none" is not repeated.

        A method that can prune in a cache has an arm whose cache has the kept tokens. Any other prunes anew for each
        question (``late``), from a cache of all tokens with its evidence.

        Args:
            folder: the folder of the arms' caches: ``full``, ``arm-0``, ``arm-1`` and so on.

        Raises:
            UsageError: a method or option cannot be used; also for ``positions`` of a method, and a ``--siglip`` that
                no method needs.
            ValueError: a method has an invalid parameter (ModelError: the model lacks its evidence).
        """
        arguments = self._arguments
        siglip = self._arguments.siglip
        grid = parse_pruning_grid(arguments.method, arguments.retention_ratio, siglip)
        if any(point.positions for point in grid):
            raise UsageError("--method: positions change no cost: use them in jobs.evaluate")
        grid = [point for point in grid if point.method != FULL]
        evidence = {pair for point in grid for pair in list_needed_evidence(point.method, source.family, point.params)}
        if siglip is not None and not {where for _, where in evidence} & HEAD_SOURCES:
            raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
        config = PruneConfig(
            videos=[arguments.videos],
            model=arguments.model,
            siglip=siglip,
            pruner=FULL,
            retention_ratio=1.0,
            evidence=[f"{name}={where}" for name, where in sorted(evidence)],
            num_frames=arguments.num_frames,
            attn=arguments.attn,
        )
        whole = resolve_recipe(config, source=source)
        arms = [Arm(FULL, 1.0, replace(whole, evidence={}), None, LocalStore(folder / "full"))]
        for number, point in enumerate(grid):
            late = resolve_pruning(point, whole.identity(self.runtime.dtype_name), whole.source, self.builder)
            arm = Arm(point.method_label, point.retention_ratio, whole, late, LocalStore(folder / f"arm-{number}"))
            if late.inside is None and late.pruner.cacheable:
                recipe = replace(whole, pruner=late.pruner, retention_ratio=late.retention_ratio, evidence={})
                arm = replace(arm, recipe=replace(recipe, config=replace(config, seed=late.seed)), late=None)
            else:
                evidence_of_arm = {column: whole.evidence[column] for _, column in late.evidence}
                arm = replace(arm, recipe=replace(whole, evidence=evidence_of_arm))
            arms.append(arm)
        return arms

    def run(self) -> list[Figures]:
        """Measure all arms in both modes, and return the samples; call it only once, since it frees the vision tower.

        All arms first answer from the videos, which fills the caches, and then from the caches.

        Raises:
            RunFailed: a video cannot be decoded.
            UsageError: a prompt does not fit the model.
            VideoFault: a video cannot be encoded or pruned.
        """
        with closing(VideoDecoder(self.arms[0].recipe.make_decode_setup())) as decoder:
            samples = self._measure(ONLINE, partial(self._ask_online, decoder))
        del self.tower
        gc.collect()
        torch.cuda.empty_cache()
        return samples + self._measure(CACHED, self._ask_cached)

    def _measure(self, mode: str, ask: Callable[[ManifestRow, int], Iterator[Figures]]) -> list[Figures]:
        """Ask about the first video to warm up, then about all videos in every repeat; return the latter samples.

        Each sample gets ``mode``, ``video_id`` and ``repeat`` (from 1), and ``say`` a line before each video.

        Args:
            ask: yields the samples of a video in a repeat; 0 is the warm-up.
        """
        self._say(f"{mode}: to warm up")
        list(ask(self.videos[0], 0))
        samples = []
        for repeat, row in product(range(1, self._arguments.repeats + 1), self.videos):
            self._say(f"{mode}: {repeat} of {self._arguments.repeats}, {row['video_id']}")
            about = {"mode": mode, "video_id": row["video_id"], "repeat": repeat}
            samples += [{**about, **sample} for sample in ask(row, repeat)]
        return samples

    def _ask_online(self, decoder: VideoDecoder, row: ManifestRow, repeat: int) -> Iterator[Figures]:
        """Decode a video; for each arm encode it, write it to the arm's cache, and yield a sample per question.

        Arms with the same evidence share the encode seconds that were measured first. The questions are asked about the
        tokens as they were stored.

        Raises:
            RunFailed: the video cannot be decoded.
            VideoFault: the video cannot be encoded or pruned.
        """
        todo: TodoRow = {**row, "attempts": repeat + 1}  # a later repeat replaces the row of an earlier one

        def decode() -> tuple[VideoRecord, NDArray[np.uint8] | None]:
            with decoder.open_archives([todo]) as archives, decoder.open(todo, archives) as source:
                return decoder.decode_row(todo, source)

        (record, frames), decode_s, _ = time_work(decode, "cpu")
        if frames is None:
            raise RunFailed(f"{record['video_id']}: {record['error_class']}: {record['error_message']}")
        encode_s_by_evidence: dict[frozenset[str], float] = {}  # the same seconds for all arms with the same evidence
        for arm in self.arms:
            encoder = VideoEncoder(arm.recipe.make_encode_setup(self._device, self.runtime.dtype_name), self.tower)
            item, seconds, peak = time_work(partial(encoder.encode_video_alone, record, frames), self._device)
            write_s, prune_s = time_work(partial(self._write, arm, item), "cpu")[1], item.record["prune_s"]
            evidence = frozenset({*arm.recipe.pruner.sources, *arm.recipe.evidence})
            encode_s = encode_s_by_evidence.setdefault(evidence, seconds - prune_s)
            about = {"video_decode_s": decode_s, "encode_s": encode_s, "prune_s": prune_s, "peak_bytes": peak}
            about["build_s"] = decode_s + encode_s + prune_s + write_s
            # The stored tokens are those of the encoder, bit for bit. A model that encodes has them on its device.
            visual = TokenCache(str(arm.store)).get(row["video_id"], evidence=[*arm.recipe.evidence]).visual
            levels = tuple(level.to(self._device) for level in visual.deepstack)
            visual = replace(visual, tokens=visual.tokens.to(self._device), deepstack=levels)
            yield from (self.ask(arm, visual, number, about) for number in range(self._arguments.questions))

    def _write(self, arm: Arm, item: VideoItem) -> None:
        """Write an encoded video to an arm's cache, and commit it."""
        rows = write_token_shard([item], store=arm.store, run_id="efficiency")
        identity = compute_fingerprint(arm.recipe.identity(self.runtime.dtype_name))
        commit_records(arm.store, "efficiency", next(self._commits), rows, made_with=identity)

    def _ask_cached(self, row: ManifestRow, repeat: int) -> Iterator[Figures]:
        """Read a video from each arm's cache, and yield a sample per question."""
        for arm in self.arms:
            cache, evidence = TokenCache(str(arm.store)), [*arm.recipe.evidence]
            columns = cache.metadata(row["video_id"])
            rows = cache.make_token_request(columns, cache.check_options(None, "index", evidence, False))
            spans = TokenShard(arm.store, columns["token_shard"], columns["footer_hash"]).spans(rows)
            video, read_s, _ = time_work(partial(cache.get, row["video_id"], evidence=evidence), "cpu")
            about = {"read_s": read_s, "bytes_read": sum(end - start for start, end in spans)}
            yield from (self.ask(arm, video.visual, number, about) for number in range(self._arguments.questions))

    def ask(self, arm: Arm, visual: Visual, question: int, about: Figures) -> Figures:
        """Ask one question about a video's tokens, pruned before if the arm prunes per question; return the sample.

        Args:
            question: a number, which makes the text unique.
            about: the figures of the steps before.

        Raises:
            UsageError: the prompt and the answer exceed the model's context.
        """
        late = arm.late
        text = _QUESTION.format(number=question)
        inside = None if late is None else late.inside

        def prune() -> Visual:
            if late is None or inside is not None:
                return replace(visual, evidence={})
            words = self._embedders.embedding(late, text)
            return late.reduce_video(visual, late.select(visual, self._device, words), own_order=False)

        kept, prune_s, prune_peak = time_work(prune, self._device)
        prompt, prompt_s, _ = time_work(lambda: self.builder.build(text, [kept]), "cpu")
        if prompt.extent + self._decoding.max_new_tokens > self.llm.context_length:
            raise UsageError(
                f"a prompt of {prompt.extent} tokens and its answer do not fit into the model's context of "
                f"{self.llm.context_length}: take fewer --num-frames"
            )
        generate = partial(self.llm.generate, [prompt], [self._decoding], inside=inside)
        (answer,), llm_s, llm_peak = time_work(generate, self._device)
        n_visual, layer, dropped = len(kept.index), 0, 0  # visual tokens that the model drops before the layer
        if late is not None and inside is not None:
            layer, dropped = late.pruner.layer or 0, n_visual - late.count_kept_inside(n_visual)
        text_config = self.builder.config.get_text_config()
        number_bytes = self.runtime.dtype.itemsize
        sample = {"video_decode_s": 0.0, "encode_s": 0.0, "prune_s": 0.0, "read_s": 0.0, "bytes_read": 0, **about}
        sample["prune_s"] += prune_s if late is not None else 0.0
        llm_with_tower_s = sample["encode_s"] + sample["prune_s"] + llm_s
        return {
            "method": arm.method,
            "retention_ratio": arm.retention_ratio,
            "question": question,
            **sample,
            "visual_tokens": n_visual - dropped,
            "prompt_tokens": len(prompt),
            "kv_bytes": compute_kv_bytes(text_config, number_bytes, len(prompt), layer=layer, dropped=dropped),
            "prompt_s": prompt_s,
            "llm_s": llm_s,
            "llm_with_tower_s": llm_with_tower_s,
            "total_s": sample["video_decode_s"] + sample["read_s"] + prompt_s + llm_with_tower_s,
            "prefill_s": answer.prefill_s,
            "prefill_rate": len(prompt) / answer.prefill_s,
            "token_decode_s": answer.decode_s,
            "decode_rate": (len(answer.token_ids) - 1) / answer.decode_s if len(answer.token_ids) > 1 else None,
            "peak_bytes": find_known_maximum(about.get("peak_bytes"), prune_peak, llm_peak),
            "answer": answer.token_ids,
        }


def compute_kv_bytes(text_config: Any, number_bytes: int, tokens: int, *, layer: int = 0, dropped: int = 0) -> int:
    """Compute the bytes of keys and values of ``tokens``, of which ``dropped`` are missing from ``layer`` on."""
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    layers = text_config.num_hidden_layers
    numbers = layers * tokens - (layers - layer) * dropped
    return int(numbers * text_config.num_key_value_heads * width * 2 * number_bytes)


def summarize_samples(arm: Arm, samples: Sequence[Figures]) -> Figures:
    """Summarize an arm's samples: {"method", "retention_ratio", ONLINE: figures, CACHED: figures}.

    A figure is the median over the mode's samples, for memory the maximum, and None if it is unknown in all of them.
    The online figures also have ``compute_break_even``.
    """
    row: Figures = {"method": arm.method, "retention_ratio": arm.retention_ratio}
    of_arm = [sample for sample in samples if sample.items() >= row.items()]
    for mode in (ONLINE, CACHED):
        of_mode = [sample for sample in of_arm if sample["mode"] == mode]
        row[mode] = {}
        for name in (name for name in of_mode[0] if name.endswith(("_s", "_rate", "_tokens", "bytes", "bytes_read"))):
            known = [sample[name] for sample in of_mode if sample[name] is not None]
            row[mode][name] = (max if name == "peak_bytes" else median)(known) if known else None
    seconds = (row[ONLINE]["build_s"], row[CACHED]["total_s"], row[ONLINE]["total_s"])
    row[ONLINE]["break_even"] = compute_break_even(*seconds)
    return row


def compute_break_even(build_s: float, cached_s: float, online_s: float) -> int | None:
    """Return the number of questions from which building and asking a cache takes no longer than asking the videos.

    At least 1; None if an answer from the cache is not faster.
    """
    return max(1, math.ceil(build_s / (online_s - cached_s))) if online_s > cached_s else None


def format_row(row: Figures, columns: Iterable[tuple[str, str]], full: Figures | None = None) -> list[str]:
    """Format the figures of a row in their units, after the method's name in the paper and the ratio in percent.

    Full retention is named "Original".

    Args:
        columns: pairs of a mode and the name of a figure; the cell is "-" if the figure is unknown.
        full: the row of full retention, to which figures with decimals in other rows show the relative change; None for
            no changes.
    """
    cells = [
        "Original" if row["method"] == FULL else format_method_title(row["method"]),
        f"{100 * row['retention_ratio']:g}%",
    ]
    for mode, name in columns:
        value = row[mode][name]
        unit, digits = next((values for end, values in _UNITS.items() if name.endswith(end)), (1, 0))
        cell = "-" if value is None else f"{value / unit:.{digits}f}"
        if value and digits and full is not None and full is not row:
            cell += f" {value / full[mode][name] - 1:+.1%}"
        cells.append(cell)
    return cells


def format_latex(heads: Sequence[str], lines: Sequence[Sequence[str]], title: str) -> str:
    """Format a table as a LaTeX tabular for the package booktabs, with ``title`` in a comment.

    Lines are grouped by their second cell, the retention ratio, in order of first occurrence.
    """
    blocks: dict[str, list[str]] = {"": []}
    for line in (heads, *lines):
        block = blocks.setdefault(line[1] if line is not heads else "", [r"\midrule"])
        block.append(" & ".join(map(escape_latex, line)) + r" \\")
    columns = f"{{l{'c' * (len(heads) - 1)}}}"
    begin = [f"% {title}", "% Needs booktabs.", rf"\begin{{tabular}}{columns}", r"\toprule"]
    return "\n".join([*begin, *chain(*blocks.values()), r"\bottomrule", r"\end{tabular}"]) + "\n"
