"""The benchmark of efficiency on real tiny models; nothing here asserts how long anything takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gstep.checkpoints import tiny
from gstep.language.layer_pruning import CACHE
from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.efficiency.parts import Answers
from jobs.benchmark.efficiency.report import break_even
from jobs.benchmark.efficiency.setup import KvShape, prepare
from pipeline.inputs.manifest import read_manifest
from tests.gstep.language.prompts import video
from tests.jobs.jobs import forbid_models

MIB = 2**20
SMALL = {"siglip": None, "random_weights": False, "videos": "sample", "num_frames": 2, "ratios": [0.25]}
SMALL |= {"questions": 1, "max_new_tokens": 3, "repeats": 1, "device": "cpu", "dtype": "auto", "attn": "auto"}


@pytest.fixture(scope="module")
def clip():
    """The path of a short clip."""
    found = read_manifest("sample").to_pylist()
    return next(row["uri"] for row in found if row["video_id"] == "carphone_pristine.mp4")


@pytest.fixture(scope="module")
def measured(clip, tmp_path_factory):
    """The record and the LaTeX of a run of every kind of method: inside the model, by the question, merging, nested."""
    folder = tmp_path_factory.mktemp("efficiency")
    argv = ["--videos", clip, "--num-frames", "4", "--questions", "2", "--max-new-tokens", "3", "--repeats", "1"]
    argv += ["--method", "fastv", "cdpruner", "fastvid", "gstep", "--retention-ratio", ".15", ".25"]
    argv += ["--json", str(folder / "record.json"), "--latex", str(folder / "table.tex")]
    assert benchmark.main(["efficiency", *argv]) == 0
    return json.loads((folder / "record.json").read_text()), (folder / "table.tex").read_text()


def of(record, method, ratio):
    (row,) = [r for r in record["rows"] if (r["method"], r["retention_ratio"]) == (method, ratio)]
    return row


def test_every_way_is_there_and_full_retention_is_first(measured):
    record, _ = measured
    asked = [(row["method"], row["retention_ratio"]) for row in record["rows"]]
    assert asked == [("none", 1.0)] + [(m, r) for m in ("fastv", "cdpruner", "fastvid", "gstep") for r in (0.25, 0.15)]
    assert len(record["samples"]) == 9 * 2 * 2 and len(record["built"]) == 9
    assert record["machine"]["processor"] and record["runtime"]["dtype"] == "float32"
    assert "attention sdpa" in record["title"] and "4 frames" in record["title"]
    full = record["rows"][0]
    for row in record["rows"]:
        assert row["visual_tokens"] <= max(1.0, row["retention_ratio"] * full["visual_tokens"] + 0.5)
        assert row["online_peak_bytes"] > 0 and row["cached_peak_bytes"] > 0 and row["bytes_read"] > 0
        assert row["decode_rate"]["low"] > 0 and row["prefill_rate"]["low"] > 0


def test_a_question_takes_what_its_parts_take(measured):
    record, _ = measured
    shared = ("prune_s", "prompt_s", "llm_s")
    for sample in record["samples"]:
        online = sample["mode"] == "online"
        own, others = (("video_decode_s", "encode_s"), ("read_s",))[:: 1 if online else -1]
        assert sample["total_s"] == pytest.approx(sum(sample[part] for part in (*own, *shared)))
        assert all(sample[part] > 0 for part in own) and not any(sample[part] for part in others)
        assert 0 < sample["prefill_s"] + sample["token_decode_s"] <= sample["llm_s"]
        assert len(sample["answer"]) == 3 and (sample["bytes_read"] > 0) != online
    for video_ in record["built"]:
        assert video_["total_s"] == pytest.approx(sum(v for k, v in video_.items() if k.endswith("_s")) / 2)


def test_both_modes_answer_the_same_about_the_same_tokens(measured):
    record, _ = measured
    answers = {"online": {}, "cached": {}}
    for s in record["samples"]:
        key = s["method"], s["retention_ratio"], s["video_id"], s["question"]
        answers[s["mode"]][key] = s["answer"], s["prompt_tokens"], s["visual_tokens"], s["kv_bytes"]
    assert answers["online"] == answers["cached"] and len(answers["online"]) == 18
    assert all(row["same_answers"] for row in record["rows"])


def test_a_cache_holds_what_a_method_keeps_or_all_where_the_question_decides(measured):
    record, _ = measured
    whole = of(record, "none", 1.0)["bytes_read"]
    assert of(record, "fastv", 0.15)["bytes_read"] == of(record, "cdpruner", 0.25)["bytes_read"] == whole
    assert of(record, "gstep", 0.15)["bytes_read"] < of(record, "gstep", 0.25)["bytes_read"] < whole / 2


def test_the_number_of_questions_from_which_a_cache_pays(measured):
    record, _ = measured
    for row in record["rows"]:
        build, cached, online = (row[name]["median"] for name in ("build_s", "cached_s", "online_s"))
        assert row["break_even"] == break_even(build, cached, online)
    for build, cached, online in (
        (10, 1, 5),
        (10, 1, 11),
        (3.3, 0.1, 1.2),
        (0.3, 0.1, 0.2),
        (0.6, 0.2, 0.5),
        (1e-9, 1, 2),
    ):
        q = break_even(build, cached, online)
        assert build + q * cached <= q * online
        assert q == 1 or build + (q - 1) * cached > (q - 1) * online
    assert break_even(1, 2, 2) is None and break_even(1, 3, 2) is None


def test_the_table_is_the_papers(measured):
    _, latex = measured
    lines = latex.splitlines()
    assert lines[6].startswith("Original (100\\%) & ") and latex.count(r"\multicolumn{5}{c}") == 2
    assert latex.index("75\\%") < latex.index("85\\%") and latex.count("\\textbf{GSTEP (Ours)}") == 2
    cells = [line for line in lines if line.startswith("CDPruner")]
    assert len(cells) == 2 and all(line.count("arrow$") == 4 for line in cells)


def test_the_cache_of_a_7b_is_as_large_as_the_paper_says():
    kv = KvShape(layers=28, kv_heads=4, head_dim=128, number_bytes=2)
    assert kv.n_bytes(1) == 56 * 1024
    assert [round(kv.n_bytes(n + 75) / MIB, 1) for n in (6272, 1568, 940)] == [347.1, 89.9, 55.5]
    fastv = (kv.n_bytes(6272 + 75, layer=2, kept=n + 75) for n in (1568, 940))
    assert [round(size / MIB) for size in fastv] == [108, 76]


@pytest.mark.parametrize("method", ["gstep", "fastv,K=1", "fastv,K=3"])
def test_the_formula_gives_the_bytes_of_the_real_cache(method, tmp_path):
    job = prepare(tmp_path, model="tiny-qwen2-5-vl", methods=[method], **SMALL)
    answers = Answers(job)
    seen = []
    answers.llm.model.register_forward_hook(lambda module, args, output: seen.append(_n_bytes(output[CACHE])))
    for arm in job.arms:
        visual = answers.chosen(arm, video("tiny-qwen2-5-vl"), 0).value[0]
        seen.clear()
        sample = answers.asked(arm, visual, 0)
        assert seen[0] == sample.kv_bytes and len(seen) == 3
        assert seen[2] == sample.kv_bytes + job.kv.n_bytes(2)


def _n_bytes(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2-5-vl"])
def test_a_config_alone_is_measured_with_random_weights(name, clip, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads(json.dumps(tiny.TINY[name].config))
    text = config.get("text_config", config)
    text.update(num_hidden_layers=3, vocab_size=1200)
    config["video_token_index" if name == "tiny" else "video_token_id"] = 1100
    (folder / "config.json").write_text(json.dumps(config))
    argv = ["--model", str(folder), "--videos", clip, "--num-frames", "2", "--max-new-tokens", "2", "--repeats", "1"]
    argv += ["--method", "fastv", "gstep", "--retention-ratio", "0.5", "--dtype", "bfloat16"]
    assert benchmark.main(["efficiency", *argv, "--json", str(tmp_path / "r.json")]) == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["random_weights"] and "random weights" in record["title"] and "bfloat16" in record["title"]
    assert all(row["same_answers"] for row in record["rows"])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model", "tiny", "--method", "fastv"], "this model has 2 layers"),
        (["--model", "tiny", "--method", "fastvid"], "--siglip"),
        (["--method", "gstep", "--siglip", "tiny"], "none of the methods takes anything from a SigLIP"),
        (["--method", "gstepp"], "unknown method"),
        (["--device", "cpu", "--attn", "flash_attention_2"], "runs on cuda"),
        (["--method", "fastv,K"], "NAME=VALUE"),
        (["--model", "/no/such/folder"], "is no folder"),
        (["--model", "."], "no config.json"),
        (["--videos", "/no/such/folder"], "no such folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(argv, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    forbid_models(monkeypatch)
    code = benchmark.main(["efficiency", *argv])
    assert code == (1 if "--videos" in argv else 2)
    assert said in capsys.readouterr().err


def test_a_prompt_beyond_the_context_is_refused(tmp_path):
    job = prepare(tmp_path, model="tiny-qwen2-5-vl", methods=["gstep"], **SMALL | {"max_new_tokens": 10**6})
    answers = Answers(job)
    with pytest.raises(ValueError, match="--num-frames"):
        answers.asked(job.arms[0], video("tiny-qwen2-5-vl"), 0)
    assert Path(tmp_path).is_dir()
