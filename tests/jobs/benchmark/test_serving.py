"""The benchmark of answering, by transformers from a cache; ``test_serving_vllm.py`` has the other ways."""

import time

import pytest

from jobs.benchmark import serving
from jobs.benchmark.serving import choose_modes, split_work
from jobs.benchmark.serving_ways import MODES, PRUNING, ServingWork, list_whole_files
from pipeline import TokenCache
from pipeline.errors import RunFailed, UsageError
from tests.builders.answers import SHAPE, tiny_cache
from tests.builders.caches import encoded, random_tokens, write_shard


@pytest.mark.slow
def test_transformers_answers_from_a_cache_cold_and_again_and_a_way_that_fails_says_why(tmp_path, measure):
    tiny_cache(tmp_path / "cache", ("a", "b"))
    argv = ["--model", "tiny", "--cache", tmp_path / "cache", "--modes", "cached-transformers", "--repeats", 1]
    argv += ["--retention-ratio", 0.25, 0.1, "--questions", 1, 2, "--max-new-tokens", 2]
    start_s = time.perf_counter()
    record, shown = measure("serving", *argv, "--plot", tmp_path / "ways.png")
    command_s, found = time.perf_counter() - start_s, record["measured"]
    sizes = [(one["retention_ratio"], one["questions"], one["requests"]) for one in found]
    assert sizes == [(0.25, 1, 2), (0.25, 2, 4), (0.1, 1, 2), (0.1, 2, 4)]
    assert all(one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0 and one["peak_mb"] > 100 for one in found)
    assert sum(one["requests"] / one["requests_per_s"] for one in found) < command_s  # of which the passes are a part
    assert found[0]["visual_tokens"] > found[2]["visual_tokens"] and found[0]["sent_kb"] is None
    assert "cached-transformers" in shown and (tmp_path / "ways.png").read_bytes().startswith(b"\x89PNG")
    job = ServingWork("tiny", str(tmp_path), 2, (0.25,), (1,), 2, 1)
    with pytest.raises(RunFailed, match=r"cached-transformers: NotACache: .*not a pruned-token cache"):
        serving.measure("cached-transformers", job)


def test_ways_with_pruning_inside_vllm_need_a_model_that_it_prunes_and_a_process_for_each_ratio():
    assert choose_modes(None, "tiny-qwen3-vl") == list(MODES)
    assert choose_modes(None, "tiny") == [mode for mode in MODES if mode not in PRUNING]
    assert choose_modes(["text-vllm"], "tiny") == ["text-vllm"]
    with pytest.raises(UsageError, match="vLLM has no pruning for llava_onevision"):
        choose_modes(["text-vllm", "live-vllm"], "tiny")
    job = ServingWork("tiny-qwen3-vl", "c", 2, (1.0, 0.5, 0.25), (1,), 2, 1)
    ratios = {mode: [part.ratios for part in split_work(mode, job)] for mode in MODES}
    assert ratios["online-vllm"] == [(1.0,)] and ratios["cached-vllm"] == [(1.0, 0.5, 0.25)]
    assert all(ratios[mode] == [(0.5,), (0.25,)] for mode in PRUNING)


@pytest.mark.parametrize("more", [{"uri": "s3://bucket/c.mp4"}, {"uri": "gone.mp4"}, {"end_s": 2.0}])
def test_the_way_from_the_videos_refuses_what_is_no_whole_local_file(tmp_path, more):
    store, file = tiny_cache(tmp_path / "cache", ()), tmp_path / "c.mp4"
    file.touch()
    for number, (name, source) in enumerate({"whole": {"uri": str(file)}, "c": {"uri": str(file), **more}}.items()):
        assert list_whole_files(TokenCache(tmp_path / "cache")) == [file] * number
        write_shard(store, name, encoded(name, random_tokens(number, SHAPE), 0.25, "gstep", **source))
    with pytest.raises(UsageError, match=r"online-vllm reads whole local files, and video c .* --modes cached-vllm"):
        list_whole_files(TokenCache(tmp_path / "cache"))
