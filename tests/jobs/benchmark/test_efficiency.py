"""The benchmark of efficiency on real tiny models; nothing here asserts how long anything takes."""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest

from gstep.checkpoints import tiny
from gstep.language import LanguageModel
from gstep.language.layer_pruning import CACHE
from jobs.benchmark.efficiency import EfficiencyRun, add_flags, compute_break_even, compute_kv_bytes
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
