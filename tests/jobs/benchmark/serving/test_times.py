"""The benchmark of answering: every way asks the same questions, and rows are sent where requests bring them alone."""

import json

import pytest

from jobs.benchmark.__main__ import main
from jobs.benchmark.serving.cached import CACHED
from jobs.benchmark.serving.command import MODES
from jobs.benchmark.serving.online import ONLINE
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROW = 64 * 2  # bytes of a token
SMALL = ["serving", "--num-frames", "8", "--retention-ratio", "0.25", "--questions", "1", "4", "--repeats", "1"]


def measured(folder, *argv):
    """(way, questions a video) -> what is measured of it."""
    assert main([*SMALL, "--max-new-tokens", "4", "--json", str(folder / "j"), *argv]) == 0
    found = json.loads((folder / "j").read_text())["measured"]
    return {(one["mode"], one["questions"]): one for one in found}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    found = measured(folder, "--plot", str(folder / "p.png"))
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    return found


def test_every_way_answers_cold_and_again(found):
    assert (*CACHED, *ONLINE) == MODES and found.keys() == {(mode, number) for mode in MODES for number in (1, 4)}
    for (mode, questions), one in found.items():
        if mode == "online-vllm-vidcom2":  # a method that vLLM has for Qwen3-VL alone
            assert one["requests_per_s"] is None and "Error" in one["note"] and "vidcom2" in one["note"]
        else:
            assert one["requests"] == 4 * questions and not one["note"], mode
            assert one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0 and one["peak_mb"] > 100, mode


def test_rows_are_sent_where_requests_bring_them_and_nowhere_else(found):
    for questions in (1, 4):
        rows, names, texts = (found[mode, questions] for mode in ("cached-vllm-rows", "cached-vllm", "text-vllm"))
        # By name go ids and positions, which requests with rows have too.
        assert rows["sent_kb"] - names["sent_kb"] > 0.9 * ROW * names["visual_tokens"] / 1e3
        assert texts["sent_kb"] < names["sent_kb"] < 0.06 * names["visual_tokens"] + 4
        assert found["cached-transformers", questions]["sent_kb"] is None


def test_the_first_question_about_a_video_finds_nothing_and_others_share_what_it_left(found):
    for mode in ("cached-vllm", "cached-vllm-rows", "text-vllm"):
        assert found[mode, 1]["reused"] < 0.2 < found[mode, 4]["reused"]


def test_ratios_are_the_same_for_the_methods_of_vllm_itself(tmp_path):
    modes = ("cached-vllm", "online-vllm-evs", "online-vllm-vidcom2")
    found = measured(tmp_path, "--model", "tiny-qwen3-vl", "--questions", "1", "--modes", *modes)
    tokens = {mode: one["visual_tokens"] for (mode, _), one in found.items()}
    assert len(tokens) == 3 and max(tokens.values()) < 1.03 * min(tokens.values())
    assert all(one["requests_per_s"] > 0 for one in found.values())
