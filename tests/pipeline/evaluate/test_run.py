"""The options of an evaluation, and its run on the driver, where what is there is scored without a model or Ray."""

import io
from dataclasses import fields, replace

import pytest
import ray
from rich.console import Console

from gstep.backbones import ModelSource
from pipeline.cache.header import HEADER, read_header, write_new_header
from pipeline.cache.merging import merge_table_files
from pipeline.cache.reader import TokenCache
from pipeline.errors import CacheLocked, IdentityMismatch, NotAnswers, QuestionsChanged, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.config import DEFAULT_METHODS, DEFAULT_RATIOS, FULL_LABEL, POSITIONS, EvaluateConfig
from pipeline.evaluate.request import prepare, read_results_header
from pipeline.evaluate.run import answer_and_score, drop_tokens, make_answers_config, score_answers
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.generate.answers import AnswersTable
from pipeline.generate.config import GenerateConfig
from pipeline.generate.late_pruning import PruningSpec
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import resolve_recipe
from pipeline.runner.claim import Claim
from pipeline.storage.stores import LocalStore
from tests.builders.answers import tiny_cache
from tests.pipeline.evaluate.layouts import QUIET, commit_replies, generated, own_request, whole
from tests.pipeline.evaluate.videomme import write_videomme

CHOICES = ["a dog", "a cat"]
ROWS = [
    {"question_id": "1", "video_id": "a", "prompt": "What?", "choices": CHOICES, "answer": "a cat"},
    {"question_id": "2", "video_id": ["a", "b"], "prompt": "Who?", "choices": CHOICES, "answer": "A"},
]


@pytest.fixture
def asked(tmp_path):
    """A function that returns a checked request to ask questions of a cache of all tokens of a and b."""
    given = {"method": ["gstep", "fastv,K=1"], "draws": 100}
    return lambda rows=ROWS, **options: own_request(tmp_path, rows, **{**given, **options})


def rights(done):
    return {(row["question_id"], row["method"]): row["right"] for row in done.scores.to_pylist()}


def test_answers_are_asked_for_as_the_protocol_says(asked):
    own, videomme = asked(), find_benchmark("videomme").protocol()
    assert (make_answers_config(own).frame_times, make_answers_config(own).choices) == ("true", "letter")
    qwen3 = make_answers_config(replace(own, protocol=videomme, source=ModelSource.resolve("tiny-qwen3-vl")))
    assert (qwen3.frame_times, qwen3.choices, qwen3.max_new_tokens) == ("stock", "generate", 16)
    assert qwen3.system == "You are a helpful assistant."
    generic = replace(own, protocol=videomme, source=ModelSource.resolve("tiny-qwen3-vl", family="generic"))
    assert (make_answers_config(generic).frame_times, generic.identity["pixels"]) == ("true", None)
    vllm = replace(own, config=replace(own.config, engine="vllm", attn="eager"))
    assert make_answers_config(vllm).attn == "auto"  # vLLM chooses its own kernel


def test_answers_that_are_there_are_scored_without_a_model_and_without_ray(asked):
    request = asked()
    store = commit_replies(request, {("1", "gstep@0.25"): "A"})
    done = answer_and_score(request, QUIET)
    assert rights(done) == {
        ("1", "none"): True, ("1", "gstep"): False, ("1", "fastv,K=1"): True,
        ("2", "none"): False, ("2", "gstep"): False, ("2", "fastv,K=1"): False,
    }  # fmt: skip
    assert (done.answers.n_ok, done.answers.n_new, done.answers.n_missing, done.videos) == (6, 0, 0, None)
    assert not ray.is_initialized() and not (store.root / "runs").exists()
    assert done.scores.schema == SCORE_SCHEMA
    # Those of a larger grid and of more questions are left where they are; a corrected answer is scored anew.
    fewer = answer_and_score(asked(method=["fastv,K=1"], limit=1), QUIET)
    assert rights(fewer) == {("1", "none"): True, ("1", "fastv,K=1"): True} and fewer.answers.n_ok == 2
    corrected = answer_and_score(asked([{**ROWS[0], "answer": "a dog"}, ROWS[1]]), QUIET)
    assert [name for name, right in rights(corrected).items() if right] == [("1", "gstep")]


def test_an_answered_question_that_changed_is_refused(asked):
    commit_replies(asked())
    answer_and_score(asked(), QUIET)
    with pytest.raises(QuestionsChanged, match=r"1: prompt was 'What\?', is 'Where\?'"):
        answer_and_score(asked([{**ROWS[0], "prompt": "Where?"}, ROWS[1]]), QUIET)
    assert read_results_header(asked().store)["about"] == asked().about  # of the scores that are there
    one = asked(limit=1)
    answer_and_score(one, QUIET)
    assert read_results_header(one.store)["about"] == one.about != asked().about


GONE = [{**ROWS[0], "video_id": "gone"}]


def test_questions_on_videos_that_nothing_is_cached_of_become_rows_which_are_asked_again_on_request_alone(asked):
    done = answer_and_score(asked(GONE), QUIET)
    assert {(row["method"], row["error_class"], row["score"]) for row in done.scores.to_pylist()} == {
        (name, "unknown-video", 0.0) for name in ("none", "gstep", "fastv,K=1")
    }
    assert (done.answers.failures, done.answers.n_new, done.answers.n_missing) == ({"unknown-video": 3}, 3, 0)
    assert answer_and_score(asked(GONE), QUIET).answers.n_new == 0
    assert answer_and_score(asked(GONE, retry_failed=True), QUIET).answers.n_new == 3
    live = AnswersTable(LocalStore(f"{asked(GONE).config.out}/answers")).live()
    assert live["attempts"].to_pylist() == [2, 2, 2] and not ray.is_initialized()


def test_a_request_that_is_refused_binds_nothing(tmp_path):
    """One with other frames than the cache has; the right one must find the place as it was."""
    data = write_videomme(tmp_path / "d", n_videos=2, faults=False, videos=False)

    def request(num_frames):
        places = {"data": str(data), "cache": str(tmp_path / "c"), "out": str(tmp_path / "r")}
        return prepare(EvaluateConfig(benchmark="videomme", num_frames=num_frames, **places), QUIET)

    right = request(4)
    recipe = resolve_recipe(right.videos, right.objects)
    tiny_cache(tmp_path / "c", ("x",), ratio=1.0, method="none", identity=recipe.identity("float32"))
    with pytest.raises(IdentityMismatch, match=r"sampling\.num_frames: the cache has 4, this run 7"):
        answer_and_score(request(7), QUIET)
    assert request(4).identity == right.identity


def test_dropping_tokens_deletes_what_a_cache_is_made_of_and_nothing_else(asked):
    request = asked()
    answers, cache = commit_replies(request), LocalStore(request.cache)
    shards = [*cache.names("tokens", ".parquet"), *cache.names("videos", ".parquet")]
    assert len(shards) == 2
    merge_table_files(cache, None, everything=True)  # one more file
    write_new_header(cache, read_header(cache))  # with a README.md
    (cache.root / "notes.txt").write_text("mine")
    (cache.root / "tokens" / "mine").mkdir()
    (cache.root / "videos" / "holiday.mp4").write_bytes(b"mine")
    messages = io.StringIO()
    drop_tokens(request, Console(file=messages, width=300))
    assert f"{cache}: 5 files deleted (--drop-tokens); the answers stay" in messages.getvalue()
    left = {path.relative_to(cache.root).as_posix() for path in cache.root.rglob("*")}
    assert left == {"notes.txt", "tokens", "tokens/mine", "videos", "videos/holiday.mp4"}
    assert answers.names("answers", ".parquet")


def test_tokens_of_another_run_of_another_place_and_of_a_cache_without_its_header_are_not_dropped(asked, tmp_path):
    request, link = asked(), tmp_path / "link"
    store = LocalStore(request.cache)
    with Claim(store, "other", print), pytest.raises(CacheLocked):
        drop_tokens(request, QUIET)
    link.symlink_to(request.cache)
    with pytest.raises(UsageError, match="is a link to another place, which is yours to delete"):
        drop_tokens(replace(request, cache=str(link)), QUIET)
    assert TokenCache(request.cache).video_ids == ["a", "b"]
    store.delete(HEADER)  # tokens may be mended by the header from a copy
    drop_tokens(request, QUIET)
    assert store.names("tokens", ".parquet")


def test_a_part_of_a_cache_is_no_cache_to_anybody_and_is_dropped_by_the_next_run(asked, monkeypatch):
    """Its tokens were being dropped when the second file could not be deleted."""
    request, delete, deleted = asked(), LocalStore.delete, []

    def fail_second(store, name):
        if deleted:
            raise OSError(5, "Input/output error", name)
        deleted.append(name)
        delete(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", fail_second)
        with pytest.raises(OSError, match="Input/output error"):
            drop_tokens(request, QUIET)
    store = LocalStore(request.cache)
    assert not store.exists(HEADER) and len(store.names("tokens", ".parquet")) == 1
    store.put("README.md", b"my notes")
    drop_tokens(request, QUIET)
    assert not store.has_other_files() and store.read("README.md") == b"my notes"


@pytest.fixture
def answered(tmp_path):
    """Answers of jobs.generate, as in a place of their own: replies to ROWS (None: it failed)."""
    whole(tmp_path)
    tiny_cache(tmp_path / "pruned", ("a", "b"), ratio=0.25, method="gstep")

    def place(name, replies="BB", rows=ROWS, cache="c", **options) -> str:
        return generated(tmp_path / cache, tmp_path / name, rows, replies, **options)

    return place


def scored(*places):
    return score_answers(EvaluateConfig(score=[*places]))


def test_answers_of_several_places_are_compared_by_what_pruned_their_tokens(answered):
    """A method prunes before tokens are cached, or when they are asked about."""
    late = {"pruner": "uniform", "retention_ratio": 0.1}
    done = scored(answered("full"), answered("early", "BA", cache="pruned"), answered("late", "A-", **late))
    found = [(r["method"], r["retention_ratio"], r["question_id"], r["right"]) for r in done.scores.to_pylist()]
    assert found == [
        ("none", 1.0, "1", True), ("none", 1.0, "2", False),
        ("gstep", 0.25, "1", True), ("gstep", 0.25, "2", True),
        ("uniform", 0.1, "1", False), ("uniform", 0.1, "2", False),
    ]  # fmt: skip
    assert [row["status"] for row in done.scores.to_pylist()] == ["ok"] * 5 + ["failed"]
    assert (done.answers, done.videos, done.loaded.n_annotated) == (None, None, 2)


def test_frames_that_moved_to_keyframes_and_coded_tokens_are_rows_of_their_own(answered, tmp_path):
    """Other differences of sampling are refused."""
    held = read_header(LocalStore(tmp_path / "pruned"))["identity"] | {"sampling": {"num_frames": 8}}
    for name, sampling in (
        ("as_asked", {}),
        ("moved", {"snap_to_keyframes_s": 5.0}),
        ("fewer", {"num_frames": 4, "snap_to_keyframes_s": 2}),
    ):
        identity = held | {"sampling": {**held["sampling"], **sampling}}
        tiny_cache(tmp_path / name, ("a", "b"), ratio=0.25, method="gstep", identity=identity)
    coded = held | {"dtype": {**held["dtype"], "stored": "int4"}}
    tiny_cache(tmp_path / "coded", ("a", "b"), ratio=0.25, method="gstep", identity=coded)
    plain = answered("plain", cache="as_asked")
    done = scored(plain, answered("snapped", cache="moved"), answered("int4", cache="coded"))
    methods = done.scores["method"].to_pylist()
    assert methods == ["gstep"] * 2 + ["gstep,snap_to_keyframes_s=5"] * 2 + ["gstep,token_codec=int4"] * 2
    with pytest.raises(UsageError, match="num_frames"):
        scored(plain, answered("others", cache="fewer"))


def test_questions_that_share_a_video_are_drawn_together(answered):
    done = scored(answered("full"))
    assert done.scores["cluster"].to_pylist() == ["a", "a"]
    named = [{**row, "cluster": row["question_id"], "split": "s"} for row in ROWS]
    done = scored(answered("named", rows=named))
    assert done.scores["cluster"].to_pylist() == ["1", "2"]
    assert [dict(splits) for splits in done.scores["splits"].to_pylist()] == [{"split": "s"}] * 2


def test_places_that_cannot_be_compared_are_refused(answered, tmp_path):
    full = answered("full")
    other = answered("other", rows=[ROWS[0], {**ROWS[1], "answer": "B"}], cache="pruned")
    fewer = answered("fewer", "B", rows=ROWS[:1], cache="pruned")
    unsaid = answered("unsaid", rows=[{**row, "answer": None} for row in ROWS], cache="pruned")
    from_1 = answered("from_1", rows=[{**row, "answer": number} for number, row in enumerate(ROWS, 1)])
    free = answered("free", cache="pruned", choices="generate")
    for places, why in (
        ((full, free), f"cannot be compared with {full}:\n  decoding.choices: "),
        ((full, other), f"--score {other} has other questions than {full}; score it separately"),
        ((full, fewer), f"--score {fewer} has other questions than"),
        ((from_1,), "seem to be counted from 1, and here 0 is the first"),
        ((full, full), f"--score {full}: none at 1 occurs twice"),
        ((unsaid,), f"--score {unsaid}: no question has an answer to compare with"),
        ((str(tmp_path / "c"),), "no answers (no answers.json)"),
    ):
        with pytest.raises(UsageError) as error:
            scored(*places)
        assert why in str(error.value)


def test_parameters_tell_methods_apart_where_they_are_not_the_methods_own(answered):
    def place(name, method, *params) -> str:
        return answered(name, pruner=method, pruner_param=[*params], retention_ratio=0.1)

    plain, set_so = place("plain", "gstep"), place("set", "gstep", "alpha=0.3", "beta=2")
    done = scored(plain, set_so, place("deep", "fastv", "K=1"))
    assert list(dict.fromkeys(done.scores["method"].to_pylist())) == ["gstep", "gstep,alpha=0.3,beta=2.0", "fastv,K=1"]
    with pytest.raises(UsageError, match=r"gstep at 0\.1 occurs twice"):
        scored(plain, place("same", "gstep", "alpha=0.5"))  # as it is anyway


def test_answers_of_an_evaluation_are_scored_by_itself(asked):
    request = asked(GONE)
    answer_and_score(request, QUIET)
    with pytest.raises(NotAnswers, match=r"answers of jobs\.evaluate, which scores them itself"):
        scored(f"{request.config.out}/answers")


def grid(*methods, ratios=(0.25,), **options):
    return EvaluateConfig(benchmark="x", method=[*methods], retention_ratio=[*ratios], **options).grid()


def test_full_retention_comes_first_then_methods_as_they_are_named_and_ratios_from_the_largest():
    assert list(grid("gstep")) == [FULL_LABEL, "gstep@0.25"] and grid("gstep")[FULL_LABEL] is None
    assert list(grid("none")) == [FULL_LABEL] == list(grid("none", ratios=(0.5, 0.1)))
    assert list(grid("uniform", "gstep", ratios=(0.1, 0.25))) == [
        FULL_LABEL, "uniform@0.25", "uniform@0.1", "gstep@0.25", "gstep@0.1"
    ]  # fmt: skip
    labels = list(EvaluateConfig(benchmark="x").grid())
    assert labels == [FULL_LABEL, *(f"{name}@{ratio:g}" for name in DEFAULT_METHODS for ratio in DEFAULT_RATIOS)]
    assert len(labels) == 17


def test_parameters_stand_behind_commas_and_are_part_of_the_label():
    asked = grid("fastv, K=3", "fastvid,c=4,a-b=0.5", "fastv,K=1")
    assert asked["fastv,K=3@0.25"] == PruningSpec("fastv", 0.25, {"K": "3"})
    assert asked["fastvid,a_b=0.5,c=4@0.25"].params == {"c": "4", "a_b": "0.5"}
    assert asked["fastv,K=1@0.25"] != asked["fastv,K=3@0.25"] and len(asked) == 4


def test_seeds_are_methods_of_their_own_and_a_range_of_them_is_short_for_each():
    assert list(grid("random,seed=0..2", "fps")) == [
        FULL_LABEL, "random,seed=0@0.25", "random,seed=1@0.25", "random,seed=2@0.25", "fps@0.25"
    ]  # fmt: skip
    assert grid("random,seed=1", "gstep", reference="random").keys() == {FULL_LABEL, "random,seed=1@0.25", "gstep@0.25"}


def test_a_method_may_name_positions_of_its_own_as_its_row_is_called():
    """Behind any parameters: rows are called by sorted names."""
    both = ("vcast,positions=original,tau=0.5", "gstep")
    named = [FULL_LABEL, "vcast,tau=0.5,positions=original@0.25"]
    assert list(grid(*both)) == [*named, "gstep@0.25"]
    assert list(grid(*both, positions="both")) == [
        *named, "gstep,positions=contiguous@0.25", "gstep,positions=original@0.25"
    ]  # fmt: skip
    assert grid(*both)[named[1]] == PruningSpec("vcast", 0.25, {"tau": "0.5"}, positions="original")
    with pytest.raises(UsageError, match="--method gstep,positions=close: positions must be contiguous or original"):
        grid("gstep,positions=close")


def test_positions_have_the_words_of_jobs_generate():
    choices = {one.name: set(one.metadata["choices"]) for one in fields(GenerateConfig) if one.name == "positions"}
    assert set(POSITIONS) - {"both"} == choices["positions"]


def test_the_runs_get_the_options_that_mean_the_same_there_and_no_other():
    """What it is asked with, how many, and where from is the evaluation's own."""
    given = EvaluateConfig(benchmark="x", workers=3, decode_workers=2, limit=5, seed=7, max_failed="1", min_gpus=1)
    prune, generate = given.select_shared_options(PruneConfig), given.select_shared_options(GenerateConfig)
    both = {"revision", "dtype", "device", "attn", "min_gpus", "max_gpus", "join", "retry_failed", "max_attempts"}
    both |= {"stall_timeout", "flush_seconds", "log_interval", "s3_endpoint", "s3_requester_pays"}
    engine = {"engine", "tensor_parallel", "engine_param", "batch_size"}
    assert prune.keys() == both | {"decode_timeout", "decode_workers", "encode_workers"}
    assert generate.keys() == both | engine | {"workers", "questions_per_shard", "close_thought"}
    assert (prune["decode_workers"], generate["workers"], prune["min_gpus"], generate["min_gpus"]) == (2, 3, 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"benchmark": None}, r"give exactly one of --benchmark NAME .*, --score ANSWERS .* and --results RESULTS"),
        ({"benchmark": None, "score": ["a"], "method": ["gstep"]}, "go with --benchmark or --results"),
        ({"out": " "}, "--out must be a folder"),
        ({"retention_ratio": [0.25, 0.0]}, r"--retention-ratio must be in \(0, 1\], got 0.0"),
        ({"method": ["fastv,K"]}, "--method fastv,K: a parameter takes NAME=VALUE, got 'K'"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"within": 1.0}, "--within goes with --results"),
        ({"benchmark": None, "results": ["r"], "within": 0.0}, "--within must be a positive number of points"),
        ({"decode_timeout": 0.0}, "--decode-timeout must be a positive number of seconds"),
        ({"max_attempts": 0}, "--max-attempts must be at least 1"),  # of all runs
        ({"fps": 2.0, "num_frames": 8}, "--num-frames and --fps are two ways of sampling"),
        ({"max_frames": 8}, "--max-frames goes with --fps"),
        ({"reference": "fps"}, "--reference fps is no row of the table; there are gstep, none, random"),
        ({"method": ["random,seed=3..1"]}, "--method random,seed=3..1: the first seed is larger than the last"),
        ({"method": ["gstep", "random,seed=1..2"], "reference": "random,seed=1"}, "there are gstep, none, random$"),
        ({"positions": "close"}, "--positions must be one of .*contiguous"),
        ({"drop_tokens": True, "cache": "c"}, "--drop-tokens deletes the cache in --out"),
    ],
)
def test_nonsense_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        EvaluateConfig(**{"benchmark": "x", **options})


@pytest.mark.parametrize("given", [{"limit": 5}, {"drop_tokens": True}, {"fps": 2.0}, {"close_thought": True}])
@pytest.mark.parametrize("other", [{"score": ["a"]}, {"results": ["r"]}])
def test_what_only_a_benchmark_has_is_refused_where_nothing_is_asked(given, other):
    with pytest.raises(UsageError, match="goes with --benchmark"):
        EvaluateConfig(**other, **given)
