"""A request to answer: checked against questions, cache, model and answers before anything is started."""

import json

import pytest

from gstep.backbones import ModelSource
from pipeline.cache.header import header_bytes
from pipeline.errors import IdentityMismatch, NotACache, NotAnswers, UsageError
from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.generate.request import match_answers
from pipeline.storage.stores import LocalStore
from tests.pipeline.asking import request_about, tiny_cache

ROWS = [
    {"question_id": "1", "video_id": "a", "prompt": "p"},
    {"question_id": "2", "video_id": ["a", "b"], "prompt": "p"},
    {"question_id": "3", "video_id": "gone", "prompt": "p"},
]


@pytest.fixture
def cache(tmp_path):
    tiny_cache(tmp_path / "c", ("a", "b", "other"))
    return tmp_path / "c"


def test_only_the_videos_that_are_asked_about_are_kept(cache):
    job = request_about(cache, ROWS)
    assert job.videos.keys() == {"a", "b"} and len(job.questions) == 3
    assert (job.source.name, job.order, job.prunings[""], job.read_ratio) == ("tiny", "index", None, None)


def test_tokens_of_a_prompt_are_foreseen(cache):
    job, smaller = request_about(cache, ROWS), request_about(cache, ROWS, retention_ratio=0.10)
    a, b = (job.videos[name] for name in "ab")
    assert job.n_visual([a]) == 49 + 1  # a quarter of 196, and the newline row
    assert job.n_visual([a, b]) == 2 * 50 and smaller.n_visual([a]) == 19 + 1


def test_the_identity_is_of_what_decides_an_answer(cache):
    plain = request_about(cache, ROWS).identity
    assert plain["retention_ratio"] == 0.25 and "pruner" not in plain
    assert request_about(cache, ROWS, batch_size=3, workers=1, retention_ratio=0.25).identity == plain
    for other in ({"retention_ratio": 0.10}, {"positions": "original"}, {"max_new_tokens": 3}, {"system": "Be brief."}):
        assert request_about(cache, ROWS, **other).identity != plain, other


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"retention_ratio": 0.5}, r"--retention-ratio 0\.5: the cache stores 0\.25"),
        ({"model": "tiny-qwen3-vl"}, "an LLM understands the tokens of its own vision encoder only"),
        ({"order": "own"}, "--order own: gstep, .* has no order of its own"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_what_does_not_go_together_is_refused(cache, options, why):
    with pytest.raises(UsageError, match=why):
        request_about(cache, ROWS, **options)
    assert not (cache.parent / "o").exists()


def test_a_cache_of_another_shape_is_refused(tmp_path):
    for name, header, why in (
        ("levels", {"deepstack_levels": 2}, "it holds 2 deepstack levels, the model takes 0"),
        ("newline", {"newline": None}, "it has no newline row"),
        ("width", {"shape": (4, 49, 32)}, "its tokens have 32 values, the model takes 64"),
    ):
        tiny_cache(tmp_path / name, **header)
        with pytest.raises(UsageError, match=why):
            request_about(tmp_path / name, ROWS)


def test_places_that_hold_something_else_are_refused(cache, tmp_path):
    with pytest.raises(NotACache):
        request_about(tmp_path / "nowhere", ROWS)
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "letter.txt").write_text("mine")
    with pytest.raises(NotAnswers, match="holds no answers"):
        request_about(cache, ROWS)


def test_an_unordered_method_serves_its_own_ratio_only(tmp_path):
    tiny_cache(tmp_path / "c", method="uniform")
    with pytest.raises(UsageError, match="without an order"):
        request_about(tmp_path / "c", ROWS, retention_ratio=0.10)


def test_a_cache_of_a_folder_needs_to_be_told_which(cache):
    header = json.loads(LocalStore(cache).read("cache.json"))
    header["identity"]["model"]["weights"] = "files:0123"
    LocalStore(cache).put("cache.json", header_bytes(header))
    with pytest.raises(UsageError, match=r"--model is missing: the cache was made with a folder \(files:0123\)"):
        request_about(cache, ROWS)
    with pytest.raises(UsageError, match=r"--model tiny has"):
        request_about(cache, ROWS, model="tiny")


def test_answers_bind_once_there_is_one(cache):
    job, other = request_about(cache, ROWS), request_about(cache, ROWS, max_new_tokens=3)
    write_answers_header(job.store, job.identity)
    match_answers(other)  # of a run that ended before its first answer
    question = job.questions.to_pylist()[0]
    commit_answers(job.store, "run", 0, [{**question, "status": "ok", "attempts": 1}])
    match_answers(job)
    with pytest.raises(IdentityMismatch, match=r"decoding\.max_new_tokens: the answers have 64, this run 3"):
        match_answers(other)


def test_the_model_is_the_one_of_the_cache(cache):
    source = request_about(cache, ROWS, model="tiny").source
    assert source.identity == ModelSource.resolve("tiny").identity == request_about(cache, ROWS).source.identity
