"""A name that is nearly right gets the right one, wherever it is given, before anything starts."""

import pytest

from jobs import evaluate, generate, inspect, prune
from jobs.__main__ import main
from tests.builders.answers import tiny_cache, write_questions
from tests.builders.runs import forbid_ray, said_by
from tests.pipeline.rewrite.test_merge import cache_of

PRUNE = ["videos.jsonl", "--out", "c"]
CASES = [
    (prune, ["video.jsonl", "--out", "c"], "videos.jsonl"),
    (prune, [*PRUNE, "--model", "shape"], "shapes"),
    (prune, [*PRUNE, "--pruner", "gstpe"], "gstep"),
    (prune, [*PRUNE, "--pruner-param", "alhpa=1"], "alpha"),
    (prune, [*PRUNE, "--decoder", "pyva"], "pyav"),
    (prune, [*PRUNE, "--evidence", "image_embeding"], "image_embedding"),
    (evaluate, ["--benchmark", "shpes", "--data", ".", "--out", "c"], "shapes"),
    (generate, ["tiny", "--questions", "question.jsonl", "--out", "a"], "questions.jsonl"),
    (inspect, ["cache", "bike.mp4"], "bikes.mp4"),
]


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["prnue"], "prune"),
        (["benchmark", "pipelin"], "pipeline"),
        (["prune", "--device", "cud"], "cuda"),
        (["prune", "--retention-ration", "0.2"], "--retention-ratio"),
        (["prune", "--drt-run=1"], "--dry-run"),
    ],
)
def test_a_mistyped_command_flag_or_choice_gets_the_likely_one_in_two_lines(argv, near, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    said = capsys.readouterr().err
    assert f"(did you mean {near}?)" in said and len(said.splitlines()) == 2


@pytest.mark.parametrize(("command", "argv", "near"), CASES, ids=[near for _, _, near in CASES])
def test_a_name_that_is_nearly_right_gets_the_right_one(command, argv, near, tmp_path, monkeypatch):
    forbid_ray(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "videos.jsonl").write_text('{"video_id": "a", "uri": "a.mp4"}\n')
    (tmp_path / "a.mp4").write_text("no video")
    if command is generate:
        tiny_cache(tmp_path / "tiny", ("a",))
        write_questions(tmp_path / "questions.jsonl", [{"question_id": 1, "video_id": "a", "prompt": "What?"}])
    cache_of(tmp_path / "cache", {"bikes.mp4": 1})
    assert f"did you mean {near}?" in said_by(command, *argv, code=2)
    assert not (tmp_path / "c").exists()
