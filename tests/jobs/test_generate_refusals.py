"""Questions that cannot be answered as asked are refused with exit code 2, before a model loads or Ray starts."""

import json
import shlex
import shutil
from importlib.util import find_spec

import pytest
import ray

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny
from gstep.checkpoints.files import SHIPPED
from gstep.checkpoints.tiny import TINY
from jobs import generate
from pipeline.cache.changed_code import find_changed_methods
from pipeline.errors import IdentityMismatch, QuestionsError
from pipeline.generate.answers import read_answers
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import describe_engine
from pipeline.generate.model import choose_model
from pipeline.options import EngineOptions
from pipeline.runner.claim import Claim
from tests.builders.answers import lines_of, request_about, tiny_cache
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.builders.runs import said_by
from tests.jobs.conftest import QUESTION

GONE = [{**QUESTION, "video_id": "gone"}]
WHOLE = {"ratio": 1.0, "method": "none"}
FASTV = "--pruner fastv --retention-ratio 0.25 --pruner-param K=1"
LMCACHE = 'kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'


def folder_model(folder, **text_config) -> ModelSource:
    """The tiny model as a folder, its text config changed."""
    shutil.copytree(tiny.build("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(text_config)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSource.resolve(folder)


@pytest.mark.parametrize(
    ("cache", "options", "why"),
    [
        ({}, "--max-new-tokens 0", "max_new_tokens must be at least 1"),
        ({}, "--temperature -1", "temperature must be 0"),
        ({}, "--batch-size 0", "--batch-size must be at least 1"),
        ({}, "--order own", "--order own: gstep, "),
        ({}, "--pruner-param K", "NAME=VALUE"),
        ({}, "--out c", "exists and holds no answers"),
        ({}, "--max-failed x", "--max-failed is a count"),
        ({}, "--ask Why?", "--ask and --questions do not go together"),
        ({}, "--retention-ratio 0.5", "--retention-ratio 0.5: the cache stores 0.25"),
        ({}, "--model tiny-qwen3-vl", "(qwen3_vl)"),
        ({}, "--config magic.yaml", "--rule must be one of"),
        ({}, "--tensor-parallel 2", "--tensor-parallel goes with --engine vllm"),
        ({}, "--engine-param gpu_memory_utilization=0.8", "--engine-param goes with --engine vllm"),
        ({}, "--engine vllm --attn eager", "--attn eager goes with --engine transformers"),
        ({}, "--engine vllm --engine-param x", "--engine-param takes NAME=VALUE"),
        ({}, "--rule magic", "invalid choice: 'magic'"),
        *(() if find_spec("vllm") else [({}, "--engine vllm", "is not installed here; it needs its own environment")]),
        ({}, "--system 'Look at the <image>.'", "question 1: the text has <image>"),
        ({"method": "uniform"}, "--retention-ratio 0.1", "only its own retention ratio 0.25"),
        ({"shape": (4, 25, 16)}, "", "its tokens have 16 values, the model takes 64"),
        ({"newline": None}, "", "it has no newline row"),
        ({"source": "tiny-qwen3-vl", "newline": None}, "", "holds 0 deepstack levels, the model takes 3"),
        (WHOLE, f"--engine vllm {FASTV}", "fastv prunes inside the language model"),
        (WHOLE, "--engine vllm --positions original", "--positions original needs --engine transformers"),
        (WHOLE, f"--engine vllm --engine-param {shlex.quote(LMCACHE)}", "LMCacheConnectorV1: it is not known to tell"),
        (WHOLE, "--pruner fastv --pruner-param K=1", "needs --retention-ratio"),
        (WHOLE, "--pruner cdpruner --retention-ratio 0.25", "--pruner none --evidence cdpruner --siglip"),
        (WHOLE, "--pruner visionzip --retention-ratio 0.25", "--pruner none --evidence visionzip"),
        (WHOLE, "--pruner-param K=1", "--pruner-param goes with --pruner"),
        (WHOLE, "--order own", "has no order of its own"),
        (WHOLE, "--siglip tiny", "--siglip goes with --pruner"),
        ({}, FASTV, "jobs.prune --pruner none"),
        # VidCom2 drops tokens at 1 too, and what others merged is no longer the encoder's.
        *(({"method": name, "ratio": 1.0}, FASTV, f"what {name} kept") for name in ("vidcom2", "visionzip")),
    ],
)
def test_options_without_sense_and_a_cache_that_cannot_serve_them(refuse, tmp_path, monkeypatch, cache, options, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "magic.yaml").write_text("rule: magic\n")
    tiny_cache(tmp_path / "c", **{**cache, "source": ModelSource.resolve(cache.get("source", "tiny"))})
    assert why in refuse(*shlex.split(options))


def test_a_file_of_removed_videos_that_cannot_be_read_is_refused(ask, tmp_path):
    tiny_cache(tmp_path / "c")
    (tmp_path / "o" / "removed").mkdir(parents=True)
    (tmp_path / "o" / "removed" / "a.json").symlink_to("/proc/self/mem")  # a file whose first byte cannot be read
    code, said = ask(read=True)
    assert code == 2 and "error: " in said and "Input/output error" in said


def test_what_is_no_cache_and_questions_with_problems(refuse, tmp_path):
    assert "not a pruned-token cache" in refuse()
    tiny_cache(tmp_path / "c")
    assert "prompt is missing; the row has: question_id, video_id" in refuse(rows=[{"question_id": 1, "video_id": "a"}])
    assert "1 question_ids repeat" in refuse(rows=[QUESTION] * 2)
    tiny_cache(tmp_path / "none", (), failed=("bad",))
    for cache, texts in (("c", []), ("c", ["Why?", "Why?"]), ("none", ["Why?"])):
        asked = [word for text in texts for word in ("--ask", text)]
        said_by(generate, tmp_path / cache, "--out", tmp_path / "o", *asked, code=2)


TALK = [{"role": role, "content": text} for role, text in (("user", "Who?"), ("assistant", "It."), ("user", "Why?"))]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"option": ["x", "y"]}, "line 1: no column option is read (did you mean choices?)"),
        ({"prompt": "Tell of the <video>."}, "q.jsonl, question 1: the text has <video>"),
        ({"choices": ["a <image>", "none"]}, "question 1: the text has <image>"),
        ({"system": "<video>"}, "question 1: the text has <video>"),
        ({"prompt": None, "messages": [TALK[0], {**TALK[1], "content": "<video>"}, TALK[2]]}, "the text has <video>"),
    ],
)
def test_columns_and_texts_that_do_not_say_what_they_seem_to(refuse, tmp_path, row, why):
    tiny_cache(tmp_path / "c")
    given = {name: value for name, value in {**QUESTION, **row}.items() if value is not None}
    assert why in refuse(rows=[given])


def test_placeholders_of_the_model_are_refused_and_those_of_other_models_are_not(tmp_path):
    tiny_cache(tmp_path / "c")
    asked = (tmp_path / "c", "--out", tmp_path / "o", "--ask", "What is in <video>?")
    assert "--ask, question a#" in said_by(generate, *asked, code=2)
    qwen = ModelSource.resolve("tiny-qwen2-5-vl")
    tiny_cache(tmp_path / "q", source=qwen, newline=None)
    rows = [{**QUESTION, "prompt": "What is a <video>?"}]
    assert lines_of(request_about(tmp_path / "q", rows)) == []
    with pytest.raises(QuestionsError, match=r"question 1: the text has <\|video_pad\|>"):
        request_about(tmp_path / "q", [{**QUESTION, "prompt": "<|vision_start|><|video_pad|><|vision_end|>Why?"}])


def test_another_model_and_one_whose_folder_must_be_named(refuse, tmp_path):
    source = folder_model(tmp_path / "m")
    tiny_cache(tmp_path / "c")
    text = refuse("--model", str(tmp_path / "m"))
    assert all(identity in text for identity in (source.identity, ModelSource.resolve("tiny").identity))
    shutil.rmtree(tmp_path / "c")
    tiny_cache(tmp_path / "c", source=source)
    assert f"--model is missing: the cache was made with a folder ({source.identity})" in refuse()


def test_videos_longer_than_the_model_takes(refuse, tmp_path):
    source = folder_model(tmp_path / "m", max_position_embeddings=60)
    store = tiny_cache(tmp_path / "c", source=source)
    model = ("--model", str(tmp_path / "m"))
    both = [{"question_id": 2, "video_id": ["a", "b"], "prompt": "Both?"}]
    # 49 tokens and a newline a video: two do not fit.
    assert "1 of 1 prompts have up to 100 visual tokens, and the model takes 60" in refuse(*model, rows=both)
    write_shard(store, "run2", encoded("long", random_tokens(9, (8, 49, 64)), 0.25, "gstep"))
    rows = [{"question_id": i, "video_id": "long", "prompt": "What?"} for i in range(3)]
    assert "3 of 3 prompts have up to 99 visual tokens" in refuse(*model, rows=rows)


def test_without_a_video_every_question_has_its_row_and_nothing_starts(ask, tmp_path):
    tiny_cache(tmp_path / "c", ("x/bikes.mp4", "a"), failed=("broken",))
    rows = [*GONE, {**QUESTION, "question_id": 2, "video_id": ["a", "broken"]}]
    rows += [{**QUESTION, "question_id": 3, "video_id": "bikes.mp4"}]
    code, text = ask(rows=rows)
    assert code == 1 and "0 answered, 3 failed" in text
    first, second, third = read_answers(tmp_path / "o").to_pylist()
    assert (first["error_class"], second["error_class"]) == ("unknown-video", "failed-video")
    assert first["error_message"].endswith(f"{tmp_path / 'c'}: prune it, then --retry-failed")
    assert "corrupt: damaged" in second["error_message"]
    assert f"{tmp_path / 'c'}; did you mean x/bikes.mp4? Correct the question, or prune" in third["error_message"]
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "o" / "runs").iterdir()]
    assert (record["status"], record["questions"]) == ("finished", 3)
    before = sorted((tmp_path / "o").rglob("*"))
    again = ("--seed", "7")  # which greedy decoding does not look at
    assert "3 of 3 questions have their answers already" in ask(*again, rows=rows)[1]
    assert sorted((tmp_path / "o").rglob("*")) == before
    assert ask("--retry-failed", rows=rows)[0] == 1 and not ray.is_initialized()
    assert {row["attempts"] for row in read_answers(tmp_path / "o").to_pylist()} == {2}


def test_answers_of_other_settings_are_refused_by_name(ask, tmp_path):
    tiny_cache(tmp_path / "c")
    assert ask(rows=GONE)[0] == 1
    changed = "--retention-ratio 0.1 --max-new-tokens 9 --positions original --choices generate --system Hi"
    code, text = ask(*changed.split(), "--temperature", "1", "--seed", "3", rows=GONE)
    assert code == 2
    for difference in (
        "retention_ratio: the answers have 0.25, this run 0.1",
        "decoding.max_new_tokens: the answers have 64, this run 9",
        "prompt.positions: the answers have 'contiguous', this run 'original'",
        "decoding.choices: the answers have 'letter', this run 'generate'",
        "decoding.system: the answers have None, this run 'Hi'",
        "decoding.seed: the answers have None, this run 3",
    ):
        assert difference in text


def test_model_and_revision_are_the_caches_wherever_its_branch_is_now():
    for model, revision, named in (
        (None, None, ("org/model", "abc")),
        ("org/model", None, ("org/model", "abc")),
        ("org/model", "main", ("org/model", "main")),
        ("org/fork", None, ("org/fork", None)),
    ):
        assert choose_model(model, revision, "hub:org/model@abc") == named
    assert all(choose_model(None, None, f"{name}:0123") == (name, None) for name in (*SHIPPED, *TINY))


def test_what_another_run_wrote_before_the_lock_was_ours_counts(ask, tmp_path, monkeypatch):
    tiny_cache(tmp_path / "c")
    assert ask("--max-new-tokens", "9", "--out", str(tmp_path / "other"), rows=GONE)[0] == 1

    def late(*arguments, **options):
        shutil.copytree(tmp_path / "other", tmp_path / "o", dirs_exist_ok=True)
        return Claim(*arguments, **options)

    monkeypatch.setattr("pipeline.generate.run.Claim", late)
    code, text = ask(rows=GONE)
    assert code == 2 and "max_new_tokens: the answers have 9, this run 64" in text


def test_answers_of_another_engine_are_refused():
    """By the header alone: answers that were there before there were engines stay what they are."""
    assert describe_engine(GenerateConfig(cache="c", questions="q.jsonl")) == {}
    params = ["quantization=fp8", "gpu_memory_utilization=0.8"]
    described = describe_engine(EngineOptions(engine="vllm", engine_param=params))
    assert described == {"engine": {"name": "vllm", "params": {"quantization": "fp8"}}}
    with pytest.raises(IdentityMismatch, match="engine"):
        find_changed_methods({"a": 1, **described}, {"a": 1}, "other answers")
