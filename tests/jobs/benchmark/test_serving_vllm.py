"""The benchmark of answering: every way asks the same questions, and rows are sent where requests bring them alone."""

import json
import subprocess
import sys

import pytest

from jobs.benchmark.serving_ways import CACHED, MODES, ONLINE
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.paths import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROW = 64 * 2  # bytes of a token
SMALL = ["serving", "--num-frames", "8", "--retention-ratio", "0.25", "--questions", "1", "4", "--repeats", "1"]


@pytest.fixture(scope="module")
def found():
    """(way, questions a video) -> what is measured of it."""
    command = [sys.executable, "-m", "jobs.benchmark", *SMALL, "--max-new-tokens", "4", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {(one["mode"], one["questions"]): one for one in json.loads(done.stdout)["measured"]}


def test_every_way_answers_cold_and_again(found):
    assert (*CACHED, ONLINE) == MODES and found.keys() == {(mode, number) for mode in MODES for number in (1, 4)}
    for (_, questions), one in found.items():
        assert one["requests"] == 4 * questions and one["peak_mb"] > 100
        assert one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0


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
