"""The options of a run that answers questions: one dataclass that flags and the run's record come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gstep.methods import OF_A_QUESTION
from pipeline.errors import UsageError
from pipeline.options import (
    ATTN,
    DEVICES,
    DTYPES,
    as_record,
    check,
    check_choices,
    failure_limit,
    option,
    positive,
    pruner_params,
)

CHOICE_METHODS = ("letter", "loglikelihood", "generate")


@dataclass(frozen=True)
class GenerateConfig:
    """Everything that ``python -m jobs.generate`` can be told. Raises UsageError where a value makes no sense."""

    cache: str = option("cache", "the cache that jobs.prune wrote", positional=True, metavar="CACHE")
    questions: str | None = option(
        None,
        "the questions (.jsonl/.parquet/.csv with question_id, video_id, prompt; optional choices, system, "
        "max_new_tokens, temperature, top_p, top_k, seed; other columns are carried along), local or s3://",
        metavar="FILE",
    )
    out: str = option("answers", "the answers to create or to continue: a folder or s3://bucket/prefix", metavar="DIR")
    model: str | None = option(
        None,
        "a Hugging Face id or folder with the weights that the cache was made with (default: as the cache says; "
        "of a folder it does not)",
        metavar="MODEL",
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face id", metavar="REV")
    retention_ratio: float | None = option(
        None, "share of the visual tokens to answer from (default: all that is stored)", metavar="R"
    )
    pruner: str | None = option(
        None,
        "a method that chooses anew for every question from a cache of all tokens: "
        f"{', '.join(OF_A_QUESTION)}, or the import path module:Class of one of your own",
        metavar="METHOD",
    )
    pruner_param: list[str] = option([], "a parameter of it; may be repeated", metavar="NAME=VALUE")
    siglip: str | None = option(
        None,
        "for methods that compare SigLIP's embedding of patches with the question, on LLaVA-OneVision: the SigLIP "
        "checkpoint that the cache's image_embedding was made with, of which the text tower is read",
        metavar="MODEL",
    )
    positions: str = option(
        "auto",
        "positions of the kept tokens: as before pruning (original) or counted anew (contiguous); auto is the model "
        "family's: contiguous for LLaVA-OneVision, original for Qwen",
        choices=("auto", "contiguous", "original"),
    )
    order: str = option(
        "auto",
        "order of the kept tokens in a prompt: ascending position (index), or the method's own (own); auto is the "
        "method's own where it has one",
        choices=("auto", "index", "own"),
    )
    rule: str = option(
        "transformers-5",
        "whose rules prompts follow where libraries differ on Qwen",
        choices=("transformers-5", "transformers-4.57", "vllm"),
    )
    system: str | None = option(None, "the system message (default: the chat template's)", metavar="TEXT")
    max_new_tokens: int = option(64, "tokens an answer may have", metavar="N")
    temperature: float = option(0.0, "0 is greedy; above, tokens are drawn", metavar="X")
    top_p: float = option(1.0, "draw among the likeliest tokens that make up this share", metavar="P")
    top_k: int = option(0, "draw among so many of the likeliest tokens; 0 is all", metavar="K")
    seed: int = option(0, "of drawing; every question draws for itself, whatever it shares a batch with")
    choices: str = option(
        "letter",
        "how a question with choices is answered: by the likeliest letter, by the likeliest text (loglikelihood), or "
        "by the letter in a generated answer (generate)",
        choices=CHOICE_METHODS,
    )
    batch_size: int = option(8, "questions that the model answers at once", metavar="N")
    workers: int | None = option(None, "models at most (default: one a GPU; one on CPUs)", metavar="N")
    device: str = option("auto", "where the model runs; auto is cuda if the cluster has GPUs", choices=DEVICES)
    dtype: str = option("auto", "its arithmetic; auto is bfloat16 on GPUs and float32 on CPUs", choices=DTYPES)
    attn: str = option("auto", "attention kernel; auto is flash-attn where it is installed, else sdpa", choices=ATTN)
    questions_per_shard: int = option(
        64, "questions in one file of answers at most, but a batch at least; small runs use fewer", metavar="N"
    )
    format: str = option("parquet", "of the answers", choices=("parquet", "jsonl"))
    limit: int | None = option(None, "only the first so many questions of the file", metavar="N")
    retry_failed: bool = option(False, "ask failed questions again")
    max_attempts: int = option(2, "with --retry-failed: attempts a question gets in all", metavar="N")
    max_failed: str | None = option(
        None,
        "failed questions tolerated before exit code 1: a count (10) or a share (0.05 or 5%%); default: all but one",
    )
    stall_timeout: float = option(
        1800.0,
        "seconds without any question moving on after which the run fails; longer than the model takes to load, and "
        "than a batch takes",
        metavar="S",
    )
    log_interval: float = option(30.0, "seconds between progress lines where the output is not a terminal", metavar="S")
    s3_endpoint: str | None = option(
        None, "address of the S3 API, where it is not Amazon's (default: AWS_ENDPOINT_URL)", metavar="URL", secret=True
    )
    s3_region: str | None = option(None, "region of the buckets (default: AWS_REGION)", metavar="REGION")

    def __post_init__(self) -> None:
        check_choices(self)
        if self.questions is None:
            raise UsageError(
                "--questions FILE is missing: a .jsonl, .parquet or .csv with question_id, video_id, prompt"
            )
        check(self.out.strip() != "", "out", "a folder or s3://bucket/prefix", self.out)
        ratio = self.retention_ratio
        check(ratio is None or 0.0 < ratio <= 1.0, "retention_ratio", "in (0, 1]", ratio)
        for name in ("batch_size", "questions_per_shard", "max_attempts"):
            check(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("workers", "limit"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1", value)
        for name in ("stall_timeout", "log_interval"):
            check(positive(getattr(self, name)), name, "a positive number of seconds", getattr(self, name))
        self.failure_limit(1)
        pruner_params(self.pruner_param)

    def failure_limit(self, n_questions: int) -> int:
        """How many of ``n_questions`` may fail before the run counts as failed."""
        return failure_limit(self.max_failed, n_questions)

    def as_record(self) -> dict[str, Any]:
        """Every option as JSON-able values, for the run's record; of a secret one only that it is set."""
        return as_record(self)
