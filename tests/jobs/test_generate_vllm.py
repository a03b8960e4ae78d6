"""``--engine vllm`` on real Ray: the answers of transformers, also where the engine's process dies under it."""

import json
import os
import signal
import threading
from statistics import fmean

import pytest
import torch

from gstep.backbones import ModelSource
from jobs import generate, recode
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.builders.answers import answers_by_id, tiny_cache, write_questions
from tests.builders.runs import family, run_here, said_by
from tests.gstep.quantized import quantize
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SAME = ("status", "choice", "n_prompt_tokens", "n_visual_tokens", "n_kept", "retention_ratio", "choice_tokens")
GREEDY = ("answer", "n_new_tokens", "finish")


@pytest.fixture
def asked(tmp_path):
    """A cache, and questions of every kind about it."""
    tiny_cache(tmp_path / "c", ("a", "b", "c"))
    rows = []
    for number in range(36):
        row = {"question_id": f"q{number:02}", "video_id": "abc"[number % 3], "prompt": f"What is thing {number}?"}
        if number % 4 == 1:
            row["choices"] = ["yes", "no, never at all", "perhaps"]
        if number % 9 == 2:
            row["video_id"] = ["a", "b"]
        if number % 5 == 4:  # some of them with choices, with two videos, or drawn
            earlier = [{"role": "user", "content": "Look at it."}, {"role": "assistant", "content": f"It is {number}."}]
            row["messages"] = [*earlier, {"role": "user", "content": row.pop("prompt")}]
        if number % 7 == 3:
            row["temperature"] = 1.0
        rows.append(row)
    rows.append({"question_id": "away", "video_id": "nope", "prompt": "?"})
    return [str(tmp_path / "c"), "--questions", str(write_questions(tmp_path / "q.jsonl", rows))]


@pytest.mark.parametrize(("choices", "codec"), [("letter", None), ("loglikelihood", "int4")])
def test_both_engines_give_the_same_rows(one_ray, asked, tmp_path, choices, codec):
    if codec is not None:
        assert recode.main([asked[0], "--token-codec", codec, "--out", str(tmp_path / "coded")]) == 0
        asked = [str(tmp_path / "coded"), *asked[1:]]
    common = [*asked, "--retention-ratio", "0.1", "--choices", choices, "--max-new-tokens", "6"]
    for engine in ("transformers", "vllm"):
        said_by(generate, *common, "--out", tmp_path / engine, "--engine", engine)
    ours, theirs = answers_by_id(tmp_path / "vllm"), answers_by_id(tmp_path / "transformers")
    assert ours.keys() == theirs.keys() and len(ours) == 37
    assert ours["away"]["error_class"] == theirs["away"]["error_class"] == "unknown-video"
    for name, row in ours.items():
        other = theirs[name]
        assert [row[key] for key in SAME] == [other[key] for key in SAME]
        if json.loads(row["decoding"]).get("temperature", 0) == 0:
            assert [row[key] for key in GREEDY] == [other[key] for key in GREEDY]
        if row["choice_scores"]:
            assert row["choice_scores"] == pytest.approx(other["choice_scores"], abs=1e-4)
    # Another engine's answers are not gone on with, and a second run asks nothing.
    assert "engine" in said_by(generate, *common, "--out", tmp_path / "vllm", code=2)
    said_by(generate, *common, "--out", tmp_path / "vllm", "--engine", "vllm")
    assert len(list((tmp_path / "vllm" / "answers").iterdir())) > 0
    assert json.loads((tmp_path / "vllm/answers.json").read_text())["identity"]["engine"] == {"name": "vllm"}


def test_an_engine_that_dies_is_restarted_and_no_question_is_lost_or_doubled(one_ray, asked, tmp_path):
    out, killed = tmp_path / "o", []

    def shards() -> int:
        return len(list((out / "answers").glob("[!.]*"))) if (out / "answers").exists() else 0

    argv = [*asked, "--out", str(out), "--engine", "vllm", "--batch-size", "4", "--questions-per-shard", "4"]

    def workers() -> set[int]:
        return {pid for pid, title in family(os.getpid()).items() if "MapWorker(MapBatches(Answerer" in title}

    left = workers()  # of the test before

    def kill() -> None:
        wait_until(lambda: shards() > 1, "an answer of the engine's", 300)  # the first is the refusal of "away"
        # A child that the worker starts has its title too, for a moment.
        (pid,) = wait_until(lambda: len(found := workers() - left) == 1 and found, "the worker alone")
        os.kill(pid, signal.SIGKILL)
        killed.append(shards())

    killer = threading.Thread(target=kill)
    killer.start()
    done = run_here(generate, [*argv, "--max-new-tokens", "40"])
    killer.join()
    assert done.returncode == 0, done.stdout
    rows = answers_by_id(out)
    assert killed and killed[0] < shards()
    assert {name for name, row in rows.items() if row["status"] != "ok"} == {"away"} and len(rows) == 37


def test_arguments_that_vllm_does_not_know_or_that_leave_no_room_for_the_largest_video_are_refused(
    one_ray, asked, tmp_path
):
    argv = [*asked, "--out", str(tmp_path / "o"), "--engine", "vllm", "--engine-param"]
    assert "has no such engine argument" in run_here(generate, [*argv, "no_such_thing=1"]).stdout
    assert "it follows from the cache" in run_here(generate, [*argv, "dtype=float16"]).stdout

    tiny_cache(tmp_path / "large", ("a", "b", "c"), shape=(280, 49, 64))  # of which a quarter is cached
    argv = [str(tmp_path / "large"), *asked[1:], "--out", str(tmp_path / "o"), "--engine", "vllm", "--engine-param"]
    refused = said_by(generate, *argv, "max_num_batched_tokens=640", code=2)
    assert "limits a video to 3,149 tokens in a prompt, and the largest has 3,431" in refused


def test_quantized_language_models_answer_and_both_models_are_in_the_identity(one_ray, asked, tmp_path):
    common = [*asked, "--retention-ratio", "0.1", "--max-new-tokens", "6"]
    assert run_here(generate, [*common, "--out", str(tmp_path / "plain")]).returncode == 0  # as vLLM answers, see above
    plain = answers_by_id(tmp_path / "plain")
    cpu = torch.cpu.get_capabilities()
    lacks = {
        "compressed-tensors": None if cpu.get("avx512_vnni") or cpu.get("avx_vnni") else "VNNI",
        "awq": None if cpu.get("avx512_bw") else "AVX-512",
    }
    # Their scores are near those of the model that they were made from, on average: 0.07 and 0.74 were measured.
    # On a CPU with AMX vLLM multiplies 8-bit weights by bfloat16 alone.
    of_8_bits = ("bfloat16", 0.6) if cpu.get("amx_tile") else ("float32", 0.2)
    for method, dtype, max_mean in (("compressed-tensors", *of_8_bits), ("awq", "bfloat16", 1.2)):
        folder, out = quantize("tiny", method, tmp_path / method), tmp_path / f"{method}-answers"
        weights = ["--model", str(folder), "--dtype", dtype, "--engine", "vllm"]
        done = run_here(generate, [*common, *weights, "--out", str(out)])
        if lacks[method]:
            assert done.returncode == 1 and f"this node's CPU has no {lacks[method]}:" in done.stdout
            continue
        assert done.returncode == 0, done.stdout
        rows = answers_by_id(out)
        assert len(rows) == 37 and all(row["answer"] or row["choices"] for name, row in rows.items() if name != "away")
        identity = json.loads((out / "answers.json").read_text())["identity"]
        assert identity["cache"]["model"]["weights"] == ModelSource.resolve("tiny").identity
        assert identity["model"]["weights"] == ModelSource.resolve(folder, quantized=True).identity
        scores = [(row["choice_scores"], plain[name]["choice_scores"]) for name, row in rows.items()]
        pairs = [pair for ours, theirs in scores if ours for pair in zip(ours, theirs, strict=True)]
        differences = [abs(score - expected) for score, expected in pairs]
        assert 0 < fmean(differences) < max_mean, differences
