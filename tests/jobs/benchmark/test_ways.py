"""The benchmarks of efficiency, decoding, reading, selecting and of the family generic; none asserts a time."""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gstep.checkpoints import tiny
from gstep.language import LanguageModel
from gstep.language.layer_pruning import CACHE
from gstep.selection.reference import density_guided_fps
from jobs.benchmark import generic
from jobs.benchmark.decode import FLOOR, IN_CHILD, IN_PROCESS, Clip, decode_needed_frames, make_clip
from jobs.benchmark.efficiency import EfficiencyRun, add_flags, compute_break_even, compute_kv_bytes
from jobs.benchmark.read import make_row
from jobs.benchmark.selection import count_loop_steps, select_by_loop
from jobs.benchmark.tokens import INPUTS
from pipeline.video.containers import sniff
from pipeline.video.probe import probe
from tests.builders.clips import sample
from tests.gstep.language.prompts import video

MIB = 2**20
CLIP = sample("carphone_pristine.mp4")


def test_table_3_has_every_method_from_the_video_and_from_a_cache(tmp_path, measure):
    # Every kind of method: inside the model, by the question, merging, nested.
    methods = ("fastv", "cdpruner", "fastvid", "gstep")
    argv = ["--videos", CLIP, "--num-frames", 2, "--questions", 2, "--max-new-tokens", 3, "--repeats", 1]
    argv += ["--method", *methods, "--retention-ratio", ".15", ".25", "--latex", tmp_path / "table.tex"]
    record, _ = measure("efficiency", *argv)
    rows = {(row["method"], row["retention_ratio"]): row for row in record["rows"]}
    assert list(rows) == [("none", 1.0)] + [(m, r) for m in methods for r in (0.25, 0.15)]
    assert "attention sdpa" in record["title"] and "2 frames" in record["title"]
    assert record["machine"]["processor"] and record["runtime"]["dtype"] == "float32"
    full = rows["none", 1.0]
    for row in rows.values():
        online, cached = row["online"], row["cached"]
        whole_tokens = full["online"]["visual_tokens"]
        assert online["visual_tokens"] <= max(1.0, row["retention_ratio"] * whole_tokens + 0.5)
        assert online["peak_bytes"] > 10 * MIB and cached["peak_bytes"] > 10 * MIB
        assert online["decode_rate"] > 0 and online["prefill_rate"] > 0
        assert online["break_even"] == compute_break_even(online["build_s"], cached["total_s"], online["total_s"])
    # A cache stores what a method keeps, or all where the question decides.
    whole, read = full["cached"]["bytes_read"], {key: row["cached"]["bytes_read"] for key, row in rows.items()}
    assert read["fastv", 0.15] == read["cdpruner", 0.25] == whole
    assert read["gstep", 0.15] < read["gstep", 0.25] < whole

    answers = {"online": {}, "cached": {}}
    for one in record["samples"]:
        online, shared = one["mode"] == "online", ("prune_s", "prompt_s", "llm_s")
        own, others = (("video_decode_s", "encode_s"), ("read_s",))[:: 1 if online else -1]
        assert one["total_s"] == pytest.approx(sum(one[part] for part in (*own, *shared)))
        assert all(one[part] > 0 for part in own) and not any(one[part] for part in others)
        assert 0 < one["prefill_s"] + one["token_decode_s"] <= one["llm_s"]
        assert len(one["answer"]) == 3 and (one["bytes_read"] > 0) != online
        key = one["method"], one["retention_ratio"], one["question"]
        same = ("answer", "prompt_tokens", "visual_tokens", "kv_bytes")
        answers[one["mode"]][key] = [one[name] for name in same]
    assert answers["online"] == answers["cached"] and len(answers["online"]) == 18

    latex = (tmp_path / "table.tex").read_text()
    assert "\nOriginal & 100\\% & " in latex and latex.count(r"\midrule") == 3
    assert latex.index("25\\%") < latex.index("15\\%") and latex.count("GSTEP &") == 2 and "Ours" not in latex
    lines = [line for line in latex.splitlines() if line.startswith("CDPruner")]
    assert len(lines) == 2 and all(line.count(" & ") == 7 and line.count("\\%") == 6 for line in lines)


def test_the_number_of_questions_from_which_a_cache_pays():
    assert [compute_break_even(*s) for s in ((10, 1, 5), (10, 1, 11), (1e-9, 1, 2), (7, 2, 4))] == [3, 1, 1, 4]
    assert compute_break_even(1, 2, 2) is None and compute_break_even(1, 3, 2) is None


def test_the_kv_cache_of_a_7b_is_as_large_as_the_paper_says():
    config = SimpleNamespace(num_hidden_layers=28, num_key_value_heads=4, hidden_size=3584, num_attention_heads=28)
    assert compute_kv_bytes(config, 2, 1) == 56 * 1024
    assert [round(compute_kv_bytes(config, 2, n + 75) / MIB, 1) for n in (6272, 1568, 940)] == [347.1, 89.9, 55.5]
    fastv = [compute_kv_bytes(config, 2, 6272 + 75, layer=2, dropped=6272 - n) for n in (1568, 940)]
    assert [round(size / MIB) for size in fastv] == [108, 76]


def test_the_formula_gives_the_bytes_of_the_real_kv_cache(tmp_path, monkeypatch):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    argv = "--num-frames 2 --retention-ratio 0.25 --device cpu --method gstep fastv,K=1 fastv,K=3 --max-new-tokens 3"
    bench, seen = EfficiencyRun(parser.parse_args(argv.split()), tmp_path, lambda line: None), []

    def n_bytes(module, args, output):
        seen.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in output[CACHE].layers))

    bench.llm.model.register_forward_hook(n_bytes)
    config, number_bytes = bench.builder.config.get_text_config(), bench.runtime.dtype.itemsize
    for arm in bench.arms:
        seen.clear()
        sample = bench.ask(arm, video("tiny-qwen2-5-vl"), 0, {})
        assert seen[0] == sample["kv_bytes"] and len(seen) == 3
        assert seen[2] == sample["kv_bytes"] + compute_kv_bytes(config, number_bytes, 2)
    monkeypatch.setattr(LanguageModel, "context_length", 10)
    with pytest.raises(ValueError, match="--num-frames"):
        bench.ask(bench.arms[0], video("tiny-qwen2-5-vl"), 0, {})


def test_a_config_alone_is_measured_with_random_weights(tmp_path, measure):
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads(json.dumps(tiny.TINY["tiny"].config))
    config["text_config"].update(num_hidden_layers=3, vocab_size=1200)
    config["video_token_index"] = 1100
    (folder / "config.json").write_text(json.dumps(config))
    argv = ["--model", folder, "--videos", CLIP, "--num-frames", 2, "--max-new-tokens", 2, "--repeats", 1]
    argv += ["--method", "fastv", "--retention-ratio", 0.5, "--dtype", "bfloat16"]
    record, _ = measure("efficiency", *argv)
    assert record["random_weights"] and "random weights" in record["title"] and "bfloat16" in record["title"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]


NAME = "h264-144p-2s-g12"


def test_all_ways_of_decoding_are_measured_beside_the_least(tmp_path, measure, monkeypatch):
    argv = ["decode", "--clips", NAME, "--frames", 4, "--repeats", 1, "--folder", tmp_path / "clips"]
    found, shown = measure(*argv)
    (clip,) = found["clips"]
    assert clip["clip"] == NAME and clip["bytes"] == 4 * 384 * 384 * 3
    measured = {way for way, seconds in clip["cpu_s"].items() if seconds is not None}
    assert measured >= {FLOOR, IN_PROCESS, IN_CHILD, "decord", "indexed", "ours, within 5 s of keyframes"}
    assert all(clip["cpu_s"][way] > 0 for way in measured) and f"{IN_PROCESS} / {FLOOR}" in shown
    (made,) = (tmp_path / "clips").iterdir()
    stamp = made.stat().st_mtime_ns
    path = make_clip(tmp_path / "clips", Clip.parse(NAME))
    assert path == made and made.stat().st_mtime_ns == stamp  # kept, and not made again
    index = probe(str(path), sniff(path))
    assert len(index.timestamps) == 48 and len(index.keyframes) == 4 and (index.width, index.height) == (256, 144)
    wanted = index.pts[np.array([0, 13, 40])].tolist()
    assert [frame.pts for frame in decode_needed_frames(str(path), wanted, index.keyframes.tolist())] == wanted

    monkeypatch.setitem(sys.modules, "decord", None)  # a library that cannot decode a clip has no figure
    found, shown = measure(*argv)
    assert found["clips"][0]["cpu_s"]["decord"] is None and f"decord / {FLOOR}" in shown


def test_all_ways_of_reading_are_measured_on_a_real_cache(tmp_path, measure):
    sizes = ["--videos", 5, "--tokens", 40, "--hidden", 8, "--videos-per-shard", 3, "--repeats", 1]
    found, shown = measure("read", *sizes, "--s3", "--folder", tmp_path)
    ways = {way["name"]: way for way in found["ways"]}
    assert len(ways) == 4 + 7 + 1 + 7 and all(len(way["seconds"]) == 1 for way in ways.values())
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" not in name} == {5 * 40 * 16}
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" in name} == {5 * 16 * 16}
    assert all(way["beside"] in {"", *ways} for way in ways.values())
    assert ways["S3: boto3, a GET a video"]["requests"] == 5 and ways["get, in order of index"]["requests"] is None
    assert ways["S3: get, in order of index"]["requests"] == 0  # so small that all came with the footer
    assert "get_many" in shown and not list(tmp_path.iterdir())


def test_shares_of_reading_are_of_the_same_round_and_of_bytes():
    plain = {"name": "plain", "n_bytes": 100, "seconds": [1.0, 2.0, 9.0], "cpu_seconds": [1.0] * 3, "requests": None}
    half = {**plain, "name": "half", "n_bytes": 50, "cpu_seconds": [0.25] * 3, "requests": 7}
    assert make_row(half, plain) == ("half", "0.00", "50%", "0.00", "200%", "7")
    assert make_row(plain, None) == ("plain", "0.00", "", "0.00", "", "")


def test_every_input_size_and_ratio_is_selected_and_the_same_tokens_are_taken(measure):
    small = ["--frames", 6, 12, "--tokens-per-frame", 36, "--hidden", 64, "--repeats", 1]
    record, shown = measure("selection", *small, "--retention-ratios", "25%", "12.5%")
    found = [(item["input"], item["n_tokens"], item["ratio"]) for item in record["times"]]
    assert sorted(found) == sorted((i, m, r) for i in INPUTS for m in (216, 432) for r in (0.25, 0.125))
    for item in record["times"]:
        assert item["same"] == 1.0 and item["loop_steps"] == item["n_kept"] - 1
        assert all(item[form] > 0 for form in ("loop", "selection", "gstep", "vidcom2"))
    about = record["machine"]
    assert about["processor"] and (about["threads"], about["torch"]) == (1, torch.__version__)
    assert f"on {about['processor']}, 1 thread, torch" in shown and " 12.5% " in shown


def test_the_loop_of_selecting_is_the_oracle_and_runs_whole_or_200_steps():
    tokens = INPUTS["iid"](4, 25, 32).flatten(0, 1)
    density = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit_DM = torch.nn.functional.normalize(tokens.float(), dim=1).T.contiguous()
    assert torch.equal(select_by_loop(unit_DM, density, 49), density_guided_fps(tokens.double(), density, 50))
    assert [count_loop_steps(*size) for size in ((6272, 3584, 1568), (25088, 3584, 6272))] == [1567, 200]


def test_the_family_generic_gives_the_same_tokens_of_the_same_clip(monkeypatch, measure):
    monkeypatch.setattr(generic, "_SECONDS", 1)
    record, shown = measure("generic", "--model", "tiny", "--height", 360, "--num-frames", 4, "--repeats", 1)
    fast, other = record["videos"]
    assert [fast["way"], other["way"]] == [generic.FAST, generic.GENERIC]
    assert fast["n_tokens"] == other["n_tokens"] == 4 * 196 and fast["same"] and other["same"]
    assert fast["frame_bytes"] == 4 * 3 * 384 * 384 and other["frame_bytes"] == 4 * 3 * 360 * 640
    assert fast["prepare_s"] is None and other["prepare_s"] > 0 and "the same tokens both ways" in shown
    for cost in (fast, other):
        steps = [cost[f"{step}_s"] for step in ("decode", "copy", "encode", "prune")]
        assert cost["total_s"] == pytest.approx(sum(steps))
