"""The benchmark of codecs: what it counts, and answers of a small model."""

import json

import pytest

from jobs.benchmark.__main__ import main
from jobs.benchmark.codecs.answers import BY_BITS
from pipeline.cache.codecs import CODECS
from tests.pipeline.asking import tiny_cache, write_questions

SMALL = ["codecs", "--tokens", "40", "--hidden", "256", "--repeats", "1"]


@pytest.fixture
def asked(tmp_path):
    tiny_cache(tmp_path / "whole", ("a", "b"), ratio=1.0, method="none", hidden_size=64)
    rows = [
        {"question_id": str(i), "video_id": "ab"[i % 2], "prompt": f"Thing {i}?", "choices": ["x", "y"], "answer": "y"}
        for i in range(4)
    ]
    rows.append({"question_id": "open", "video_id": "a", "prompt": "Why?"})
    return ["--whole", str(tmp_path / "whole"), "--questions", str(write_questions(tmp_path / "q.jsonl", rows))]


def test_bytes_errors_and_outliers(tmp_path):
    assert main([*SMALL, "--json", str(tmp_path / "out.json")]) == 0
    found = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["costs"]}
    assert len(found) == 7 and found["bfloat16"]["error"] == 0.0
    assert {name: found[name]["token_bytes"] for name in CODECS} == {
        name: codec.token_bytes(256) for name, codec in CODECS.items()
    }
    assert found["int8"]["error"] < 0.01 < found["int4"]["error"] < 0.11
    assert found["int4 without kept channels"]["rest_error"] > 2 * found["int4"]["rest_error"]
    assert found["int4 after Hadamard blocks of 256"]["rest_error"] > 2 * found["int4"]["rest_error"]


def test_answers_by_method_ratio_and_codec(tmp_path, asked, capsys):
    plot, out = tmp_path / "p.png", tmp_path / "out.json"
    argv = [*SMALL, *asked, "--method", "gstep", "random", "--retention-ratio", "0.5", "0.1"]
    assert main([*argv, "--plot", str(plot), "--json", str(out)]) == 0
    cells = json.loads(out.read_text())["answers"]
    assert len(cells) == 2 * 2 * len(BY_BITS) and plot.read_bytes().startswith(b"\x89PNG")
    for cell in cells:
        if cell["codec"] == "bfloat16":
            assert cell["kl"] == 0.0 and cell["loss"]["mean"] == cell["loss"]["high"] == 0.0
            assert cell["mb"] == pytest.approx(44.96 * cell["ratio"], rel=1e-3)
        assert 0.0 <= cell["right"] <= 1.0
    worse = {cell["codec"]: cell["kl"] for cell in cells if (cell["method"], cell["ratio"]) == ("gstep", 0.5)}
    assert worse["int8"] < worse["int4"] < worse["int2"]


def test_what_makes_no_sense_is_refused(tmp_path, asked, capsys):
    tiny_cache(tmp_path / "kept", ("a", "b"), hidden_size=64)
    open_question = str(write_questions(tmp_path / "n.jsonl", [{"question_id": "1", "video_id": "a", "prompt": "?"}]))
    for argv, said in (
        ([*SMALL, *asked[:2]], "go together"),
        ([*SMALL, "--plot", str(tmp_path / "p.png")], "--plot draws"),
        ([*SMALL, *asked[:3], open_question], "no question has choices"),
        ([*SMALL, *asked, "--method", "gsetp"], "did you mean gstep?"),
        ([*SMALL, *asked, "--method", "gstep", "fastvid"], "--method fastvid needs more than tokens"),
        ([*SMALL, *asked[2:], "--whole", str(tmp_path / "kept")], "--whole must be a cache of all tokens"),
    ):
        assert main(argv) == 2
        assert said in " ".join(capsys.readouterr().err.split())
