"""The benchmark of answering: every way asks the same questions. test_serving_pruning_vllm.py has those that prune."""

import json
from itertools import product

import pytest

from jobs.benchmark.serving_ways import CACHED, MODES, ONLINE, PRUNING
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.interpreter import run_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROW = 64 * 2  # bytes of a token
SMALL = ["serving", "--num-frames", "8", "--retention-ratio", "1.0", "0.25", "--questions", "1", "4", "--repeats", "1"]
WAYS = (*CACHED, ONLINE)
CASES = list(product(WAYS, (1.0, 0.25), (1, 4)))


@pytest.fixture(scope="module")
def found():
    """(way, share of tokens, questions a video) -> what is measured of it."""
    done = run_python("-m", "jobs.benchmark", *SMALL, "--max-new-tokens", "4", "--modes", *WAYS, "--json", check=True)
    return {(one["mode"], one["retention_ratio"], one["questions"]): one for one in json.loads(done.stdout)["measured"]}


def test_every_way_answers_cold_and_again(found):
    assert (*WAYS, *PRUNING) == MODES
    assert list(found) == [case for case in CASES if case[:2] != (ONLINE, 0.25)]
    for (_, _, questions), one in found.items():
        assert one["requests"] == 4 * questions and one["peak_mb"] > 100
        assert one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0


def test_rows_are_sent_with_each_question_and_others_share_what_the_first_one_about_a_video_left(found):
    for questions in (1, 4):
        rows, texts = found["cached-vllm", 0.25, questions], found["text-vllm", 0.25, questions]
        assert rows["sent_kb"] > 0.9 * ROW * rows["visual_tokens"] / 1e3 > texts["sent_kb"] > 0
        assert found["cached-transformers", 0.25, questions]["sent_kb"] is None
    for mode, ratio in product(("cached-vllm", "text-vllm"), (1.0, 0.25)):
        assert found[mode, ratio, 1]["reused"] < 0.2 < found[mode, ratio, 4]["reused"]
