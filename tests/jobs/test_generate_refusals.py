"""Questions that cannot be answered as asked are refused with exit code 2, before a model loads or Ray starts."""

import json
import shutil
from importlib.util import find_spec

import pytest
import ray

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny
from gstep.checkpoints.files import SHIPPED
from gstep.checkpoints.tiny import TINY
from jobs import generate
from pipeline.cache.changed_code import match_identity
from pipeline.errors import IdentityMismatch
from pipeline.generate.answers import read_answers
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import describe_engine
from pipeline.generate.model import choose_model
from pipeline.options import EngineOptions
from pipeline.runner.claim import Claim
from tests.jobs.conftest import QUESTION
from tests.pipeline.asking import tiny_cache
from tests.pipeline.caches import encoded, random_tokens, write_shard


def folder_model(folder, **text_config) -> ModelSource:
    """The tiny model as a folder, its text config changed."""
    shutil.copytree(tiny.build("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(text_config)
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSource.resolve(folder)


def test_not_a_cache(refuse):
    assert "not a pruned-token cache" in refuse()


def test_questions_with_problems(refuse, ask, tmp_path):
    tiny_cache(tmp_path / "c")
    assert "prompt is missing; the row has: question_id, video_id" in refuse(rows=[{"question_id": 1, "video_id": "a"}])
    assert "1 question_ids repeat" in refuse(rows=[QUESTION] * 2)
    assert "none.csv: cannot be read" in refuse("--questions", str(tmp_path / "none.csv"))
    assert generate.main([str(tmp_path / "c")]) == 2  # no --questions
    assert "--ask and --questions do not go together" in refuse("--ask", "Why?")
    for texts in ("--ask", " "), ("--ask", "Why?", "--ask", "Why?"):
        assert generate.main([str(tmp_path / "c"), "--out", str(tmp_path / "o"), *texts]) == 2
    tiny_cache(tmp_path / "none", (), failed=("bad",))
    assert generate.main([str(tmp_path / "none"), "--ask", "Why?", "--out", str(tmp_path / "o")]) == 2


def test_another_model(refuse, tmp_path):
    tiny_cache(tmp_path / "c")
    shutil.copytree(tiny.build("tiny"), tmp_path / "m")
    text = refuse("--model", str(tmp_path / "m"))
    assert all(ModelSource.resolve(name).identity in text for name in ("tiny", tmp_path / "m"))
    text = refuse("--model", "tiny-qwen3-vl")
    assert "(llava_onevision)" in text and "(qwen3_vl)" in text
    assert "has no config.json" in refuse("--model", str(tmp_path))


def test_a_folder_must_be_named(refuse, tmp_path):
    source = folder_model(tmp_path / "m")
    tiny_cache(tmp_path / "c", source=source)
    assert f"--model is missing: the cache was made with a folder ({source.identity})" in refuse()


def test_tokens_of_another_width_or_without_newline(refuse, tmp_path):
    tiny_cache(tmp_path / "c", shape=(4, 25, 16))
    assert "its tokens have 16 values, the model takes 64" in refuse()
    shutil.rmtree(tmp_path / "c")
    tiny_cache(tmp_path / "c", newline=None)
    assert "it has no newline row" in refuse()


def test_tokens_without_deepstack_levels(refuse, tmp_path):
    tiny_cache(tmp_path / "c", source=ModelSource.resolve("tiny-qwen3-vl"), newline=None)
    assert "holds 0 deepstack levels, the model takes 3" in refuse()
    shutil.rmtree(tmp_path / "c")
    tiny_cache(tmp_path / "c", deepstack_levels=2)
    assert "holds 2 deepstack levels, the model takes 0" in refuse()


def test_a_ratio_that_the_cache_cannot_serve(refuse, tmp_path):
    tiny_cache(tmp_path / "c", method="uniform")
    assert "--retention-ratio 0.5: the cache stores 0.25" in refuse("--retention-ratio", "0.5")
    assert "only its own retention ratio 0.25" in refuse("--retention-ratio", "0.1")
    assert "--retention-ratio must be in (0, 1]" in refuse("--retention-ratio", "0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--top-p", "0"], "top_p must be in"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--questions-per-shard", "0"], "--questions-per-shard must be at least 1"),
        (["--order", "own"], "--order own: gstep, "),
        (["--pruner-param", "K"], "NAME=VALUE"),
        (["--max-attempts", "0"], "--max-attempts must be at least 1"),
        (["--out", " "], "--out must be a folder"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--max-failed", "x"], "--max-failed is a count"),
    ],
)
def test_options_without_sense(refuse, tmp_path, options, message):
    tiny_cache(tmp_path / "c")
    assert message in refuse(*options)


def test_an_unknown_policy_is_refused(ask, refuse, tmp_path):
    tiny_cache(tmp_path / "c")
    for option in ("--positions", "--rule", "--frame-times", "--choices"):
        with pytest.raises(SystemExit) as refused:
            ask(option, "magic")
        assert refused.value.code == 2
    (tmp_path / "o.yaml").write_text("rule: magic\n")
    assert "--rule must be one of" in refuse("--config", str(tmp_path / "o.yaml"))


def test_videos_longer_than_the_model_takes(refuse, ask, tmp_path):
    source = folder_model(tmp_path / "m", max_position_embeddings=60)
    store = tiny_cache(tmp_path / "c", source=source)
    model = ("--model", str(tmp_path / "m"))
    rows = [QUESTION, {"question_id": 2, "video_id": ["a", "b"], "prompt": "Both?"}]
    # 49 tokens and a newline a video: two do not fit.
    assert "1 of 1 prompts have up to 100 visual tokens, and the model takes 60" in refuse(*model, rows=rows[1:])
    write_shard(store, "run2", encoded("long", random_tokens(9, (8, 49, 64)), 0.25, "gstep"))
    rows = [{"question_id": i, "video_id": "long", "prompt": "What?"} for i in range(3)]
    assert "3 of 3 prompts have up to 99 visual tokens" in refuse(*model, rows=rows)


def test_where_answers_cannot_be(refuse, ask, tmp_path):
    tiny_cache(tmp_path / "c")
    code, text = ask("--out", str(tmp_path / "c"))
    assert code == 2 and "exists and holds no answers" in text
    assert "is a folder, s3://" in refuse("--out", "ftp://bucket/answers")


def test_an_id_that_is_not_there_gets_the_likely_one(ask, tmp_path):
    tiny_cache(tmp_path / "c", ("x/bikes.mp4", "y/boats.mp4"))
    assert ask(rows=[{**QUESTION, "video_id": "bikes.mp4"}])[0] == 1
    (row,) = read_answers(tmp_path / "o").to_pylist()
    assert f"{tmp_path / 'c'}; did you mean x/bikes.mp4? Correct the question, or prune" in row["error_message"]


def test_without_a_video_every_question_has_its_row_and_nothing_starts(ask, tmp_path):
    tiny_cache(tmp_path / "c", failed=("broken",))
    rows = [{**QUESTION, "video_id": "gone"}, {**QUESTION, "question_id": 2, "video_id": ["a", "broken"]}]
    code, text = ask(rows=rows)
    assert code == 1 and "0 answered, 2 failed" in text
    first, second = read_answers(tmp_path / "o").to_pylist()
    assert (first["error_class"], second["error_class"]) == ("unknown-video", "failed-video")
    assert first["error_message"].endswith(f"{tmp_path / 'c'}: prune it, then --retry-failed")
    assert "corrupt: damaged" in second["error_message"]
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "o" / "runs").iterdir()]
    assert (record["status"], record["questions"]) == ("finished", 2)
    before = sorted((tmp_path / "o").rglob("*"))
    assert "2 of 2 questions have their answers already" in ask(rows=rows)[1]
    assert sorted((tmp_path / "o").rglob("*")) == before
    assert ask("--retry-failed", rows=rows)[0] == 1 and not ray.is_initialized()
    assert {row["attempts"] for row in read_answers(tmp_path / "o").to_pylist()} == {2}


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--retention-ratio", "0.1"], "retention_ratio: the answers have 0.25, this run 0.1"),
        (["--max-new-tokens", "9"], "decoding.max_new_tokens: the answers have 64, this run 9"),
        (["--positions", "original"], "prompt.positions: the answers have 'contiguous', this run 'original'"),
        (["--choices", "generate"], "decoding.choices: the answers have 'letter', this run 'generate'"),
        (["--system", "Hi"], "decoding.system: the answers have None, this run 'Hi'"),
        (["--temperature", "1", "--seed", "3"], "decoding.seed: the answers have None, this run 3"),
    ],
)
def test_answers_of_other_settings_are_refused_by_name(ask, tmp_path, options, difference):
    tiny_cache(tmp_path / "c")
    rows = [{**QUESTION, "video_id": "gone"}]
    assert ask(rows=rows)[0] == 1
    code, text = ask(*options, rows=rows)
    assert code == 2 and difference in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, ("org/model", "abc")),
        ({"model": "org/model"}, ("org/model", "abc")),
        ({"model": "org/model", "revision": "main"}, ("org/model", "main")),
        ({"model": "org/fork"}, ("org/fork", None)),
    ],
)
def test_the_revision_is_the_caches_wherever_its_branch_is_now(options, named):
    assert choose_model(options.get("model"), options.get("revision"), "hub:org/model@abc") == named


def test_what_another_run_wrote_before_the_lock_was_ours_counts(ask, tmp_path, monkeypatch):
    tiny_cache(tmp_path / "c")
    rows = [{**QUESTION, "video_id": "gone"}]
    code, _ = ask("--max-new-tokens", "9", "--out", str(tmp_path / "other"), rows=rows)
    assert code == 1

    def late(*arguments, **options):
        shutil.copytree(tmp_path / "other", tmp_path / "o", dirs_exist_ok=True)
        return Claim(*arguments, **options)

    monkeypatch.setattr("pipeline.runner.driver.Claim", late)
    code, text = ask(rows=rows)
    assert code == 2 and "max_new_tokens: the answers have 9, this run 64" in text


def test_a_seed_that_greedy_decoding_does_not_look_at_is_no_difference(ask, tmp_path):
    tiny_cache(tmp_path / "c")
    rows = [{**QUESTION, "video_id": "gone"}]
    ask(rows=rows)
    assert "have their answers already" in ask("--seed", "7", rows=rows)[1]


@pytest.mark.parametrize("name", [*SHIPPED, *TINY])
def test_a_model_of_this_package_needs_no_flag(name):
    assert choose_model(None, None, f"{name}:0123") == (name, None)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_there_is_refused_with_the_remedy(refuse, tmp_path):
    tiny_cache(tmp_path / "c")
    assert "--engine vllm: vLLM is not installed here; it needs its own environment" in refuse("--engine", "vllm")


def test_what_vllm_cannot_answer_is_refused_before_it_is_looked_for(refuse, tmp_path):
    tiny_cache(tmp_path / "c", ratio=1.0, method="none")
    vllm = ["--engine", "vllm"]
    fastv = [*vllm, "--pruner", "fastv", "--retention-ratio", "0.5", "--pruner-param", "K=1"]
    assert "fastv prunes inside the language model" in refuse(*fastv)
    assert "--positions original needs --engine transformers" in refuse(*vllm, "--positions", "original")
    lmcache = ["--engine-param", 'kv_transfer_config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}']
    assert "LMCacheConnectorV1: it is not known to tell two videos apart" in refuse(*vllm, *lmcache)


def test_the_other_engines_options_are_refused(refuse, tmp_path):
    tiny_cache(tmp_path / "c")
    assert "--tensor-parallel goes with --engine vllm" in refuse("--tensor-parallel", "2")
    assert "--engine-param goes with --engine vllm" in refuse("--engine-param", "gpu_memory_utilization=0.8")
    assert "--engine-param takes NAME=VALUE" in refuse("--engine", "vllm", "--engine-param", "x")


def test_answers_of_another_engine_are_refused(tmp_path):
    """By the header alone: what the answers were made with is what they say."""
    tiny_cache(tmp_path / "c")
    config = GenerateConfig(cache=str(tmp_path / "c"), questions="q.jsonl")
    # Answers that were there before there were engines stay what they are.
    assert describe_engine(config) == {}
    params = ["quantization=fp8", "gpu_memory_utilization=0.8"]
    described = describe_engine(EngineOptions(engine="vllm", engine_param=params))
    assert described == {"engine": {"name": "vllm", "params": {"quantization": "fp8"}}}
    held, wanted = {"a": 1, **described}, {"a": 1}
    with pytest.raises(IdentityMismatch, match="engine"):
        match_identity(held, wanted, "other answers")
