"""The options of ``jobs.generate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gstep.methods import METHODS
from pipeline.errors import UsageError
from pipeline.options import DTYPES, EngineOptions, PrunerOptions, check, check_ratio, option

CHOICE_METHODS = ("letter", "loglikelihood", "generate")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The options that determine prompts about cached videos, shared by ``jobs.generate`` and ``jobs.serve``."""

    model: str | None = option(
        None,
        "a Hugging Face id or folder with the weights that the cache was made with (default: the id that the cache "
        "names; a folder must be given here)",
        metavar="MODEL",
        group="model",
    )
    dtype: str = option("auto", "the model's arithmetic; auto is bfloat16 on GPUs and float32 on CPUs", choices=DTYPES)
    positions: str = option(
        "auto",
        "positions of the kept tokens: as before pruning (original) or renumbered (contiguous); auto is the model "
        "family's: contiguous for LLaVA-OneVision and InternVL, original for Qwen. On LLaVA-OneVision original gains "
        "more than a choice of method",
        choices=("auto", "contiguous", "original"),
        group="prompts",
    )
    rule: str = option(
        "transformers-5",
        "the library whose rules prompts follow where libraries differ on Qwen",
        choices=("transformers-5", "transformers-4.57", "vllm"),
    )
    frame_times: str = option(
        "true",
        "timestamps of frames that Qwen3-VL reads: when frames are shown (true), or their index divided by the average "
        "frame rate of the file (stock), as in transformers; they differ if the frame rate varies",
        choices=("true", "stock"),
    )


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(PromptOptions, PrunerOptions, EngineOptions):
    """The options of ``python -m jobs.generate``. Raises UsageError for an invalid value."""

    item: ClassVar[str] = "question"

    cache: str = option(
        "cache", "the cache that jobs.prune wrote", positional=True, metavar="CACHE", group="questions and answers"
    )
    questions: str | None = option(
        None,
        "the questions (.jsonl/.parquet/.csv with question_id, video_id, prompt or messages; optional choices, answer, "
        "system, max_new_tokens, temperature, top_p, top_k, seed; other columns are carried along), local or s3://",
        metavar="FILE",
    )
    ask: list[str] = option(
        [],
        "instead of a file: ask every video of the cache this; may be repeated. A question_id is the video's id, # and "
        "a hash of the text",
        metavar="TEXT",
    )
    out: str = option("answers", "the answers to create or to continue: a folder or s3://bucket/prefix", metavar="DIR")
    format: str = option("parquet", "file format of the answers", choices=("parquet", "jsonl"))
    limit: int | None = option(None, "ask only the first N questions", metavar="N")
    family: str | None = option(
        None,
        "the family that the cache was made with, if it is your own, module:Class: a cache alone never selects code",
        metavar="FAMILY",
        group="model",
    )
    siglip: str | None = option(
        None,
        "for methods that compare SigLIP's embedding of patches with the question, such as cdpruner on "
        "LLaVA-OneVision: the SigLIP checkpoint that the cache's image_embedding was made with; its text tower is read",
        metavar="MODEL",
    )
    retention_ratio: float | None = option(
        None,
        "share of the visual tokens to answer from, such as 0.10 or 10%% (default: all that is stored)",
        metavar="R",
        share=True,
        group="pruning",
    )
    pruner: str | None = option(
        None,
        "prune a cache of all tokens now, with this method at --retention-ratio; methods that use the question "
        f"select again for each question: {', '.join(METHODS)}, or module:Class of your own",
        metavar="METHOD",
    )
    pruner_seed: int = option(0, "with --pruner: seed of the methods that draw random numbers", metavar="N")
    order: str = option(
        "auto",
        "order of the kept tokens in a prompt: index is ascending index, own is the order that the method defines; "
        "auto is own if the method defines one",
        choices=("auto", "index", "own"),
        group="prompts",
    )
    system: str | None = option(None, "the system message (default: the chat template's)", metavar="TEXT")
    close_thought: bool = option(
        False,
        "if the chat template ends with an opening tag, such as <think> of a model that reasons, append its closing "
        "tag, so that the model answers at once",
    )
    choices: str = option(
        "letter",
        "how a question with choices is answered: by the likeliest letter, by the likeliest text (loglikelihood), or "
        "by the letter in a generated answer (generate)",
        choices=CHOICE_METHODS,
    )
    max_new_tokens: int = option(64, "maximum number of tokens of an answer", metavar="N", group="decoding")
    temperature: float = option(0.0, "0 is greedy; above 0, tokens are drawn at random", metavar="X")
    top_p: float = option(1.0, "draw among the likeliest tokens that make up this share", metavar="P", share=True)
    top_k: int = option(0, "draw among the K likeliest tokens; 0: among all tokens", metavar="K")
    seed: int = option(0, "seed of drawn answers; an answer does not depend on the batch of its question", metavar="N")
    workers: int | None = option(
        None, "start at most N models (default: one per GPU; one on CPUs)", metavar="N", group="workers and shards"
    )
    questions_per_shard: int = option(
        64, "put at most N questions, but at least a batch, into one file; small runs put fewer", metavar="N"
    )

    def __post_init__(self) -> None:
        """Raise UsageError if an option has an invalid value, or if two options contradict or lack each other."""
        super().__post_init__()
        if self.questions is None and not self.ask:
            raise UsageError(
                "--questions FILE is missing: a .jsonl, .parquet or .csv with question_id, video_id, prompt or "
                "messages; or --ask TEXT asks every video of the cache"
            )
        if self.engine == "vllm" and self.attn != "auto":
            raise UsageError(f"--attn {self.attn} goes with --engine transformers: vLLM chooses its own kernel")
        check(all(map(str.strip, self.ask)), "ask", "a text", self.ask)
        check(len(set(self.ask)) == len(self.ask), "ask", "another text each time", self.ask)
        if self.questions is not None and self.ask:
            raise UsageError("--ask and --questions do not go together: ask by one of them")
        check(self.out.strip() != "", "out", "a folder or s3://bucket/prefix", self.out)
        ratio = self.retention_ratio
        check_ratio("retention_ratio", ratio)
        check(self.pruner_seed >= 0, "pruner_seed", "at least 0", self.pruner_seed)
        if self.pruner is None:
            for name in ("pruner_param", "siglip", "pruner_seed"):
                if getattr(self, name):
                    raise UsageError(f"--{name.replace('_', '-')} goes with --pruner")
        elif ratio is None:
            raise UsageError(
                f"--pruner {self.pruner} needs --retention-ratio, the share of visual tokens that it keeps"
            )
        check(self.questions_per_shard >= 1, "questions_per_shard", "at least 1", self.questions_per_shard)
        for name in ("workers", "limit"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1", value)
