"""A benchmark scored end to end: VideoMME with its faults, real videos, a real Ray, one encode for the whole grid."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.backbones import ModelSource
from gstep.language import Decoding, prompt_builder
from gstep.methods import METHODS
from jobs import evaluate
from pipeline import TokenCache, read_answers
from pipeline.evaluate.benchmarks import BENCHMARKS, find_benchmark
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.generate.answers import AnswersTable
from pipeline.generate.engines.vllm import VllmEngine
from pipeline.storage.stores import LocalStore
from pipeline.video.frame_folders import JPEGS
from tests.builders.answers import thinking_model, write_questions
from tests.builders.clips import sample
from tests.builders.runs import committed, forbid_models, forbid_ray, said_by
from tests.gstep.llms import llm
from tests.jobs.faults import Driver, die_before_the_third_commit_of_answers
from tests.pipeline.evaluate.mvbench import FRAMES, write_main
from tests.pipeline.evaluate.videomme import LEFT_OUT, PER_VIDEO, video_id, write_videomme

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

N_VIDEOS = 3
GRID = ("--method", "gstep", "vidcom2", "fastv,K=1", "--retention-ratio", "0.25", "0.1")
ARMS = ["none@1", *(f"{name}@{ratio}" for name in ("gstep", "vidcom2", "fastv,K=1") for ratio in (0.25, 0.1))]
LIGHT = ("--num-frames", "4", "--draws", "200")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_videomme(tmp_path_factory.mktemp("videomme"), n_videos=N_VIDEOS)


def evaluated(data: Path, out: Path, *options: str, benchmark: str = "videomme", code: int = 0) -> str:
    """What the command says."""
    return said_by(evaluate, "--benchmark", benchmark, "--data", data, "--out", out, *LIGHT, *options, code=code)


@pytest.fixture(scope="module")
def results(data, tmp_path_factory) -> Path:
    """GRID on all videos."""
    out = tmp_path_factory.mktemp("results") / "r"
    evaluated(data, out, *GRID)
    return out


def scores_of(out: Path) -> pa.Table:
    return pq.read_table(out / "scores.parquet")


def everything_asked(out: Path) -> Counter:
    """(question, pruning) of every row of answers; one that stands in a merged file too counts once."""
    rows = AnswersTable(LocalStore(out / "answers")).rows().select(["question_id", "pruning", "run_id", "attempts"])
    return Counter(row[:2] for row in {tuple(row.values()) for row in rows.to_pylist()})


def test_every_question_is_answered_under_every_pruning_from_one_encode(results, data):
    questions = N_VIDEOS * PER_VIDEO
    scores = scores_of(results)
    assert scores.schema.equals(SCORE_SCHEMA) and len(scores) == questions * len(ARMS)
    assert set(scores["status"].to_pylist()) == {"ok"}
    assert set(everything_asked(results).values()) == {1} and len(everything_asked(results)) == questions * len(ARMS)
    cache = TokenCache(results / "cache")
    assert sorted(committed(cache.store)) == sorted(video_id(number) for number in range(N_VIDEOS))  # decoded once each
    assert len(list((results / "cache" / "runs").iterdir())) == len(list((results / "answers" / "runs").iterdir())) == 1
    kept = {(row["method"], row["retention_ratio"], row["n_kept"]) for row in scores.to_pylist()}
    total = 4 * 196
    assert {("none", 1.0, total), ("gstep", 0.25, total // 4), ("gstep", 0.1, total // 10)} < kept
    assert {("fastv,K=1", 0.25, total // 4), ("fastv,K=1", 0.1, round(total / 10))} < kept
    for row in scores.to_pylist():
        inside = row["method"].startswith("fastv")
        assert (row["kept_per_frame"] is None) == inside and (inside or sum(row["kept_per_frame"]) == row["n_kept"])
        assert row["right"] == (row["parsed"] is not None and row["parsed"] == row["answer"])
    never = [row for row in scores.to_pylist() if row["answer"] is None]
    assert len(never) == len(ARMS) and not any(row["right"] for row in never)


def test_tables_and_page_are_written(results):
    markdown, latex = (results / "tables.md").read_text(), (results / "tables.tex").read_text()
    for name in ("Full retention", "GSTEP", "VidCom2", "FastV, K=1", "Short", "Medium", "Long", "Overall", "Rel."):
        assert name in markdown and name in latex
    cut = Counter(row["pruning"] for row in read_answers(results / "answers").to_pylist() if row["finish"] == "length")
    rows = json.loads((results / "tables.json").read_text())[0]["rows"]
    assert [row["n_cut"] for row in rows] == [cut[f"{row['method']}@{row['retention_ratio']:g}"] for row in rows]
    assert sum(cut.values()) > 0 and f"Cut: {sum(cut.values())} of {len(scores_of(results))} replies" in latex
    page = (results / "report.html").read_text()
    assert "VideoMME" in page and "missing-video" in page and "http://" not in page.replace("http://www.w3.org", "")


def test_the_same_command_again_asks_nothing_and_more_methods_join_those_there(results, data, tmp_path, monkeypatch):
    out = tmp_path / "r"
    shutil.copytree(results, out)
    before = scores_of(out)
    with monkeypatch.context() as patch:
        forbid_ray(patch)
        forbid_models(patch)
        said = evaluated(data, out, *GRID)
    assert scores_of(out).equals(before)
    assert f"{N_VIDEOS * PER_VIDEO} questions to ask; {N_VIDEOS * PER_VIDEO + LEFT_OUT} annotated of 2,700" in said
    for line in ("3 missing-video, left out", "1 repeated-candidate, kept", "1 answer-no-candidate, kept", "1 policy"):
        assert line in said
    asked = everything_asked(out)
    evaluated(data, out, "--method", "gstep", "random", "--retention-ratio", "0.25", "--seed", "1")
    evaluated(data, out, "--method", "gstep", "random,seed=0..1", "--retention-ratio", "0.25")
    more = everything_asked(out)
    assert {pruning for _, pruning in (more - asked)} == {"random@0.25", "random,seed=1@0.25"}
    assert set(more.values()) == {1}
    kept = {row["pruning"]: row["kept_per_frame"] for row in read_answers(out / "answers").to_pylist()}
    assert kept["random@0.25"] != kept["random,seed=1@0.25"]
    assert {row["method"] for row in scores_of(out).to_pylist()} == {"none", "gstep", "random", "random,seed=1"}
    assert "| Random, 2 seeds |" in (out / "tables.md").read_text()
    evaluated(data, out, *GRID)  # nothing is lost by having asked for less in between
    assert everything_asked(out) == more and scores_of(out).equals(before)


def test_a_grid_that_is_killed_goes_on_and_answers_nothing_twice(one_ray, results, data, tmp_path):
    out = tmp_path / "r"
    argv = ["--benchmark", "videomme", "--data", str(data), "--out", str(out), *LIGHT, *GRID]
    argv += ["--questions-per-shard", "8"]
    log = tmp_path / "log"
    driver = Driver(argv, log, die_before_the_third_commit_of_answers, command="jobs.evaluate", RAY_ADDRESS=one_ray)
    assert driver.wait() == -signal.SIGKILL, driver.output
    held = everything_asked(out)
    assert 0 < len(held) < N_VIDEOS * PER_VIDEO * len(ARMS)
    said = evaluated(data, out, *GRID, "--questions-per-shard", "8")
    assert f"{len(held)} of {N_VIDEOS * PER_VIDEO * len(ARMS)} questions have their answers already" in said
    assert everything_asked(out) == everything_asked(results)
    assert (out / "tables.md").read_text() == (results / "tables.md").read_text()
    assert (out / "tables.tex").read_text() == (results / "tables.tex").read_text()
    drawn = ["choice_scores"]  # none here; the rest does not depend on what was asked beside it
    assert scores_of(out).drop_columns(drawn).equals(scores_of(results).drop_columns(drawn))


def test_full_retention_replies_as_the_model_does_on_all_tokens(tmp_path):
    """pipeline/generate/test_prompts.py holds these against the stock models on pixels."""
    data, out, source = tmp_path / "data", tmp_path / "r", ModelSource.resolve("tiny")
    write_videomme(data, n_videos=2, faults=False)
    for number, clip in enumerate(("bikes.mp4", "carphone_pristine.mp4")):  # noise alone would make replies alike
        shutil.copy(sample(clip), data / video_id(number))
    evaluated(data, out, "--method", "none", "--limit", str(PER_VIDEO + 3))
    benchmark, cache, build = find_benchmark("videomme"), TokenCache(out / "cache"), prompt_builder(source).build
    protocol, items = benchmark.protocol(), benchmark.load(data).items[: PER_VIDEO + 3]
    system = protocol.get_rules(source.model_type).system
    texts = [protocol.text(item, source.model_type) for item in items]
    prompts = [build(text, [cache.get(item.video_id).visual], system) for text, item in zip(texts, items, strict=True)]
    expected = llm("tiny").generate(prompts, [Decoding(max_new_tokens=protocol.decoding.max_new_tokens)] * len(prompts))
    replies = {row["question_id"]: row["answer"] for row in read_answers(out / "answers").to_pylist()}
    assert [replies[item.question_id] for item in items] == [answer.text for answer in expected]
    assert len(set(replies.values())) > 2  # they do depend on what is asked and seen


def test_every_method_of_the_table_joins_by_its_name_and_those_that_need_evidence_by_another_cache(
    results, data, tmp_path
):
    """On LLaVA-OneVision, with the pooling head and the text tower that some need. Evidence beside the tokens changes
    none of them: the answers that are there stay, and none is asked again."""
    out = tmp_path / "r"
    shutil.copytree(results, out)
    methods = [name if name != "fastv" else "fastv,K=1" for name in METHODS if name != "none"]
    asked = ("--method", *methods, "--retention-ratio", "0.25", "--siglip", "tiny")
    said = evaluated(data, out, *asked, code=2)
    assert "has no " in said and ": name another --cache" in said
    evaluated(data, out, *asked, "--cache", str(tmp_path / "c"))
    new = {f"{name}@0.25" for name in methods} - set(ARMS)
    assert {pruning for _, pruning in everything_asked(out) - everything_asked(results)} == new
    assert set(everything_asked(out).values()) == {1}
    scores = scores_of(out)
    assert set(scores["method"].to_pylist()) == {"none", *methods} and set(scores["status"].to_pylist()) == {"ok"}


def test_frames_by_time_and_a_closed_thought(tmp_path):
    data, out = write_videomme(tmp_path / "d", n_videos=1, faults=False), tmp_path / "r"
    shutil.copy(sample("bikes.mp4"), data / video_id(0))
    argv = ["--benchmark", "videomme", "--data", str(data), "--out", str(out), "--draws", "100", "--method", "none"]
    argv += ["--model", str(thinking_model(tmp_path / "m")), "--fps", "2", "--max-frames", "6", "--json"]
    assert "--close-thought" in said_by(evaluate, *argv, code=2) and not out.exists()
    said = said_by(evaluate, *argv, "--close-thought")
    assert f"note: 1 video was capped at 6 frames (lowest rate 0.6 frames per second, of {video_id(0)})" in said
    cache = TokenCache(out / "cache")
    assert (cache.identity["sampling"]["fps"], cache.identity["sampling"]["max_frames"]) == (2.0, 6)
    assert cache.metadata(video_id(0))["n_frames"] == 6  # of 10 s
    held = [json.loads((out / name).read_text())["identity"] for name in ("evaluation.json", "answers/answers.json")]
    assert held[0]["thought"] == held[1]["prompt"]["thought"] == "closed"
    assert held[0]["frames"] == held[1]["protocol"]["frames"] == {"fps": 2.0, "max_frames": 6}


def test_questions_of_ones_own_on_a_cache_that_is_there(results, tmp_path):
    ids = TokenCache(results / "cache").video_ids
    row = {"prompt": "What?", "choices": ["a dog", "a cat", "a kite"], "answer": "a cat"}
    rows = [{"question_id": i, "video_id": video, "split": f"s{i % 2}", **row} for i, video in enumerate(ids)]
    rows.append({"question_id": "free", "video_id": ids[0], "prompt": "Say something.", "answer": "something"})
    file = write_questions(tmp_path / "mine.jsonl", rows)
    argv = ["--benchmark", str(file), "--cache", str(results / "cache"), "--out", str(tmp_path / "r"), "--draws", "200"]
    said_by(evaluate, *argv, "--method", "gstep", "--retention-ratio", "0.25")
    scores = scores_of(tmp_path / "r").to_pylist()
    assert len(scores) == 2 * len(rows)
    chosen = [row for row in scores if row["question_id"] != "free"]
    for row in chosen:  # the likeliest letter
        assert row["parsed"] == row["choice_scores"].index(max(row["choice_scores"]))
        assert row["right"] == (row["parsed"] == 1)
    assert "s1" in (tmp_path / "r" / "tables.md").read_text()
    said = said_by(evaluate, *argv[:2], "--out", tmp_path / "other", code=2)
    assert "is not a cache, and there are no videos to make one from" in said


def test_what_cannot_be_evaluated_is_refused_before_anything_is_encoded(data, results, idle, tmp_path, monkeypatch):
    row = {"question_id": 1, "video_id": "a", "prompt": "What?", "answer": "x"}
    questions = write_questions(tmp_path / "q.jsonl", [row])
    asked, vllm = ("--benchmark", "videomme", "--data", str(data)), ("--engine", "vllm")
    before = sorted([*results.rglob("*"), *data.rglob("*")])
    for why, out, options in (
        ("no such folder", "r", ("--benchmark", "videomme", "--data", str(tmp_path / "gone"))),
        ("VideoMME has lmms-eval-0.7.3, lmms-eval-0.5, official", "r", (*asked, "--protocol", "mine")),
        ("yours to delete", "r", (*asked, "--cache", str(tmp_path / "c"), "--drop-tokens")),
        ("prunes inside the language model", "r", (*asked, "--method", "fastv,K=1", *vllm)),
        ("results of other settings", results, (*asked, "--protocol", "official", *LIGHT)),
        ("holds no results", data, asked),
        ("is not a cache, and there are no videos to make one from", "r", ("--benchmark", str(questions))),
        ("engine.name: the answers have None, this run 'vllm'", results, (*asked, *LIGHT, *vllm)),
    ):
        if out == results:
            monkeypatch.setattr(VllmEngine, "check", lambda *_: None)  # as where it is installed
        assert why in said_by(evaluate, "--out", tmp_path / out, *options, code=2)
        assert sorted([*results.rglob("*"), *data.rglob("*")]) == before and not (tmp_path / "r").exists()


def test_a_video_that_cannot_be_decoded_costs_its_own_questions_alone(tmp_path):
    data, out = write_videomme(tmp_path / "d", n_videos=2, faults=False), tmp_path / "r"
    (data / video_id(1)).write_bytes(b"no video at all" * 99)
    evaluated(data, out, "--method", "gstep", "--retention-ratio", "0.25")
    scores = scores_of(out).to_pylist()
    failed = Counter((row["video_id"], row["error_class"]) for row in scores if row["status"] == "failed")
    assert failed == {(video_id(1), "failed-video"): 2 * PER_VIDEO}
    assert all(row["score"] == 0 for row in scores if row["status"] == "failed") and len(scores) == 2 * PER_VIDEO * 2
    shutil.copy(sample("bikes.mp4"), data / video_id(1))
    evaluated(data, out, "--method", "gstep", "--retention-ratio", "0.25", "--retry-failed")
    assert {row["status"] for row in scores_of(out).to_pylist()} == {"ok"}


def test_every_clip_and_folder_of_frames_is_encoded_once_and_every_question_is_answered(tmp_path):
    """Of revision main; that of the videos that are cut already differs in its annotations alone."""
    data, out = write_main(tmp_path / "d"), tmp_path / "r"
    grid = ("--retention-ratio", "0.25", "--method", "gstep")
    said = evaluated(data, out, *grid, benchmark="mvbench")
    items = BENCHMARKS["mvbench"].load(data).items
    scores = pq.read_table(out / "scores.parquet")
    assert set(scores["status"].to_pylist()) == {"ok"} and len(scores) == 2 * len(items) == 28
    cache = TokenCache(out / "cache")
    assert Counter(committed(cache.store)) == Counter({item.video_id for item in items})
    assert "1 missing-video, left out" in said and "not the published one" in said
    assert "MVBench" in (out / "report.html").read_text()
    clip = cache.get("video/star/Charades_v1_480/-B1CD.mp4#t=1.5,9").metadata
    assert (clip["start_s"], clip["end_s"], clip["clip_frames"]) == (1.5, 9.0, 30)
    frames = cache.get(f"video/tvqa/frames_fps3_hq/{FRAMES}#t=0,4").metadata
    assert (frames["backend"], frames["fps"], frames["clip_frames"]) == (JPEGS, 3.0, 12)
    assert frames["frame_indices"] == [0, 3, 7, 11]  # of 00001.jpg to 00012.jpg
    evaluated(data, out, *grid, "uniform", benchmark="mvbench")  # no video is taken for changed, or encoded again
    assert Counter(committed(cache.store)) == Counter({item.video_id for item in items})
    assert len(pq.read_table(out / "scores.parquet")) == 3 * len(items)
