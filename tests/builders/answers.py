"""Files of questions, and small caches that the tiny model can be asked about."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console

from gstep.backbones import ModelSource, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.tensors import compute_tower_hash
from pipeline.cache.header import HEADER
from pipeline.cache.schema import SCHEMA_VERSION
from pipeline.errors import VideoFault
from pipeline.generate.answer_setup import AnswerSetup
from pipeline.generate.answers import AnswersIdentity, read_answers
from pipeline.generate.config import GenerateConfig
from pipeline.generate.late_pruning import LatePruning, PruningSpec
from pipeline.generate.prompts import PreparedQuestion, PromptMaker
from pipeline.generate.questions import AnswerMode, read_questions
from pipeline.generate.request import AnswerRequest, check_request
from pipeline.rows import QuestionRecord, drop_nulls
from pipeline.runner.worker_heartbeat import Heartbeat
from pipeline.storage.stores import LocalStore, Store
from tests.builders.caches import (
    encoded,
    encoded_failure,
    encoded_with,
    make_identity,
    random_evidence,
    random_tokens,
    read_live,
    write_shard,
)

SHAPE = (4, 49, 64)  # [T,N,D]: what the tiny model takes


def write_questions(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the rows to a file of the kind that its name says."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
        path.write_text(text.getvalue())
    return path


def decode_newline(source: ModelSource) -> str:
    """Return the newline row of a model, as a header holds it."""
    row = family_of(source).static().newline
    assert row is not None
    return base64.b64encode(row.to(torch.bfloat16).view(torch.int16).numpy().tobytes()).decode()


def tiny_cache(
    out: Path,
    ids: tuple[str, ...] = ("a", "b"),
    *,
    ratio: float = 0.25,
    method: str = "gstep",
    source: ModelSource | None = None,
    shape: tuple[int, int, int] = SHAPE,
    failed: tuple[str, ...] = (),
    model_extra: dict[str, Any] | None = None,
    draw: Callable[[int, tuple[int, int, int]], torch.Tensor] = random_tokens,
    **header: Any,
) -> Store:
    """Write a cache of drawn tokens that says it is of ``source`` (the tiny model).

    ``draw`` makes a video's tokens of its number and the shape; ``header`` overrides keys of the header.
    """
    source = source or ModelSource.resolve("tiny")
    store = LocalStore(out)
    store.make()
    if "newline" not in header:
        header["newline"] = decode_newline(source)
    full = {"schema_version": SCHEMA_VERSION, "identity": make_identity(ratio, method, source=source), **header}
    store.put(HEADER, json.dumps(full).encode())
    extra = {"tower_hash": compute_tower_hash(source)}
    extra |= {} if model_extra is None else {"model_extra": json.dumps(model_extra)}
    rows = [encoded(name, draw(i, shape), ratio, method, **extra) for i, name in enumerate(ids)]
    rows += [encoded_failure(name, VideoFault("corrupt", "damaged")) for name in failed]
    write_shard(store, "run", *rows)
    return store


def setup_of(
    store: Store,
    *,
    source: ModelSource | None = None,
    prunings: Mapping[str, LatePruning | None] | None = None,
    **options: Any,
) -> AnswerSetup:
    """Return what an actor on the CPU needs to answer about a cache of ``source`` (the tiny model)."""
    config, source = GenerateConfig(questions="q.jsonl", **options), source or ModelSource.resolve("tiny")
    return AnswerSetup(config, source, store, read_live(store), prunings or {"": None}, device="cpu")


def thinking_model(folder: Path) -> Path:
    """Make the tiny model with a chat template that opens a thought, as that of Qwen3-VL-Thinking does."""
    shutil.copytree(tiny.build("tiny"), folder)
    with (folder / "chat_template.jinja").open("a") as file:
        file.write("{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}")
    return folder


def request_about(
    cache: Path,
    rows: list[dict[str, Any]],
    grid: Mapping[str, PruningSpec | None] | None = None,
    about: AnswersIdentity | None = None,
    **options: Any,
) -> AnswerRequest:
    """Return a checked request to ask ``rows`` of the cache; their file and the answers lie beside it.

    With a ``grid`` each is asked under every pruning of it, as in an evaluation, ``about`` something.
    """
    path = str(write_questions(cache.parent / "q.jsonl", rows))
    config = GenerateConfig(cache=str(cache), questions=path, out=str(cache.parent / "o"), **options)
    questions = None if grid is None else read_questions(path, AnswerMode.of(config))
    console = Console(file=io.StringIO(), width=400)
    return check_request(config, console, questions, grid, about).match_answers()


def tiny_qwen_cache(out: Path) -> Store:
    """Write a cache of all tokens of the video "a", of four frames, that says it is of the tiny Qwen2.5-VL."""
    extra = {"video_grid_thw": [4, 8, 12], "spatial_merge_size": 2, "second_per_grid_ts": 1.3}
    source = ModelSource.resolve("tiny-qwen2-5-vl")
    shape = {"shape": (4, 24, 64), "model_extra": extra}
    return tiny_cache(out, ("a",), ratio=1.0, method="none", source=source, newline=None, **shape)


def sent(questions: pa.Table) -> list[dict[str, Any]]:
    """Return questions as the driver sends them to an actor."""
    return [{**drop_nulls(row, QuestionRecord), "attempts": 1} for row in questions.to_pylist()]


def prepared(request: AnswerRequest) -> PreparedQuestion | dict[str, Any]:
    """Return what an actor makes of the one question of a request: its prompt, or the row that says why not."""
    (question,) = sent(request.questions)
    prompts = PromptMaker(request.setup, SimpleNamespace(context_length=10**6), "cpu", Heartbeat("answer"))
    return prompts.make(question, AnswerMode.parse(question["decoding"]))


def answers_by_id(out: Path | str) -> dict[str, dict[str, Any]]:
    """Return the answers of a place by question; no question has two."""
    rows = read_answers(out).to_pylist()
    found = {row["question_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def lines_of(request: AnswerRequest) -> list[str]:
    """Return the lines that a request has printed."""
    assert isinstance(request.console.file, io.StringIO)
    return request.console.file.getvalue().splitlines()


def tiny_cache_with_embeddings(out: Path, shape: tuple[int, int, int] = (4, 49, 64), head: str | None = None) -> Store:
    """Write a cache of all tokens of the video "a", made, it says, with the tiny model and the tiny SigLIP's head."""
    source = ModelSource.resolve("tiny")
    model = {"type": source.model_type, "weights": source.identity, "pooling_head": head}
    identity = make_identity(1.0, "none", model=model, evidence={"image_embedding": "single_patches"})
    store = tiny_cache(out, (), ratio=1.0, method="none", failed=("bad",), identity=identity)
    evidence = {"image_embedding": random_evidence(shape, 64)["image_embedding"]}
    write_shard(store, "run", encoded_with("a", random_tokens(0, shape), 1.0, "none", evidence))
    return store
