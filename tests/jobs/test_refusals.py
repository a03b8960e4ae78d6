"""What makes no sense is refused with exit code 2, by name, before a model loads or Ray starts."""

import json
import shutil

import pytest
import ray
import torch

from jobs import inspect, prune, recode, reprune
from tests.jobs.jobs import clips, forbid_ray, run


@pytest.fixture
def refuse(monkeypatch, capsys):
    """Run a command that must be refused; an attempt to start Ray would fail differently."""
    forbid_ray(monkeypatch)

    def check(command, argv: list[str]) -> str:
        assert command.main(argv) == 2
        return " ".join(capsys.readouterr().err.split())

    return check


@pytest.fixture
def videos(tmp_path):
    folder = tmp_path / "videos"
    folder.mkdir()
    shutil.copy(clips()[0], folder)
    return folder


def test_no_such_folder(refuse, tmp_path):
    assert "nowhere: no such folder" in refuse(prune, [str(tmp_path / "nowhere"), "--out", str(tmp_path / "c")])


@pytest.mark.parametrize(
    ("videos", "why"),
    [
        ("m.jsonl", "1 of 2 videos may not be read, so nothing was started: 1: the path resolves outside the folder"),
        ("notes.txt", "notes.txt is not a video container; it looks like text; name a video"),
    ],
)
def test_what_the_list_alone_tells_is_told_at_once(refuse, tmp_path, videos, why):
    rows = [{"video_id": "in", "uri": "a.mp4"}, {"video_id": "out", "uri": "/etc/hostname"}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "notes.txt").write_text("no video")
    said = refuse(prune, [str(tmp_path / videos), "--out", str(tmp_path / "c"), "--dry-run"])
    assert why in said and ("--video-root /etc, or correct the list" in said) == (videos == "m.jsonl")
    assert not (tmp_path / "c").exists()


def test_unknown_pruner_and_parameter(refuse, videos, tmp_path):
    out = ["--out", str(tmp_path / "c")]
    assert "gstep" in refuse(prune, [str(videos), *out, "--pruner", "magic"])
    assert "alpha" in refuse(prune, [str(videos), *out, "--pruner-param", "gamma=1"])
    assert "alpha" in refuse(prune, [str(videos), *out, "--pruner-param", "alpha=2"])


def test_limits_of_pixels_that_do_not_fit_the_model(refuse, videos, tmp_path):
    out = ["--out", str(tmp_path / "c")]
    assert "one size" in refuse(prune, [str(videos), *out, "--max-pixels", "1000"])
    assert "at most 10 pixels" in refuse(prune, [str(videos), *out, "--model", "tiny-qwen3-vl", "--max-pixels", "10"])
    assert "--min-pixels must be at least 1" in refuse(prune, [str(videos), *out, "--min-pixels", "0"])


@pytest.mark.parametrize("pruner", ["cdpruner", "fastv"])
def test_a_pruner_that_selects_for_each_question(refuse, videos, tmp_path, pruner):
    text = refuse(prune, [str(videos), "--out", str(tmp_path / "c"), "--pruner", pruner])
    assert f"--pruner none, then python -m jobs.generate --pruner {pruner}" in text
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (
            "tiny-qwen2-5-vl",
            ["visionzip", "--pruner-param", "variant=llava"],
            "qwen2_5_vl does not give token_attention, token_key from the encoder's last",
        ),
        (
            "tiny-qwen3-vl",
            ["visionzip", "--pruner-param", "variant=llava"],
            "models of type llava_onevision do, and none, random, uniform, topk, fps, gstep, novelty, divprune,",
        ),
        (
            "tiny-qwen3-vl",
            ["fastvid", "--pruner-param", "variant=llava"],
            "qwen3_vl does not give frame_feature, token_",
        ),
        ("tiny-qwen2-5-vl", ["flashvid"], "--pruner flashvid: the encoder of qwen2_5_vl does not give token_attention"),
        ("tiny-qwen3-vl", ["holitom"], "--pruner holitom: the encoder of qwen3_vl does not give token_attention from"),
        ("tiny", ["fastvid", "--pruner-param", "variant=qwen"], "models of type qwen2_5_vl or qwen3_vl or"),
        ("tiny", ["fastvid"], "name it with --siglip, for the published models google/siglip-so400m-patch14-384"),
        ("tiny", ["fastvid", "--siglip", "nowhere/at/all"], "'nowhere/at/all' is no folder on this machine"),
        (
            "tiny",
            ["gstep", "--siglip", "tiny"],
            "--siglip is for methods that ask SigLIP's pooling head; this --pruner",
        ),
        ("tiny-qwen3-vl", ["fastvid", "--siglip", "tiny"], "this --pruner fastvid does not"),
    ],
)
def test_a_pruner_that_needs_what_the_encoder_does_not_give(refuse, videos, tmp_path, model, options, why):
    text = refuse(prune, [str(videos), "--out", str(tmp_path / "c"), "--model", model, "--pruner", *options])
    assert why in text and "--pruner" in text
    assert not (tmp_path / "c").exists()


def test_unknown_model_type(refuse, videos, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    text = refuse(prune, [str(videos), "--out", str(tmp_path / "c"), "--model", str(model)])
    assert "gpt2" in text and "llava_onevision" in text


def test_model_without_safetensors(refuse, videos, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llava_onevision"}))
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    text = refuse(prune, [str(videos), "--out", str(tmp_path / "c"), "--model", str(model)])
    assert "safetensors" in text


def test_model_with_code_of_its_own(refuse, videos, tmp_path):
    (tmp_path / "model.py").write_text("raise SystemExit('the code was run')")
    config = {"model_type": "mine", "auto_map": {"AutoModel": "model.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refuse(prune, [str(videos), "--out", str(tmp_path / "c"), "--model", str(tmp_path)])
    assert "'mine'" in text and "Code that comes with a checkpoint (auto_map) is never run" in text


def test_output_folder_that_holds_something_else(refuse, videos, tmp_path):
    assert "is no cache" in refuse(prune, [str(videos), "--out", str(videos)])
    file = tmp_path / "file"
    file.write_text("x")
    assert "is no cache" in refuse(prune, [str(videos), "--out", str(file)])


def test_cache_of_another_schema(refuse, videos, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "cache.json").write_text('{"schema_version": 99}')
    assert "schema version 99" in refuse(prune, [str(videos), "--out", str(tmp_path / "c")])


@pytest.mark.parametrize("command", [recode, reprune])
def test_a_rewriting_says_what_its_source_is_and_why_its_store_failed(refuse, tmp_path, capsys, command):
    (tmp_path / "file").write_text("x")
    argv = ["--out", str(tmp_path / "made")]
    assert "file: not a pruned-token cache" in refuse(command, [str(tmp_path / "file"), *argv])
    (tmp_path / "odd" / "cache.json").mkdir(parents=True)
    assert command.main([str(tmp_path / "odd"), *argv]) == 1
    assert "failed: [Errno 21] Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"video_id": "\\ud800", "uri": "a.mp4"}', "video_id is not valid text"),
        ('{"video_id": "a", "uri": "a\\u0000.mp4"}', "uri is not valid text"),
        ('{"video_id": "a", "uri": "a.mp4", "start_s": 1' + "0" * 400 + "}", "not a number of seconds"),
    ],
)
def test_hostile_manifest_values(refuse, tmp_path, line, message):
    (tmp_path / "m.jsonl").write_text(line)
    assert message in refuse(prune, [str(tmp_path / "m.jsonl"), "--out", str(tmp_path / "c")])


def test_places_where_no_cache_can_be(refuse, videos, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "cannot be made" in refuse(prune, [str(videos), "--out", str(tmp_path / "file" / "sub")])
    assert "is a folder, s3://" in refuse(prune, [str(videos), "--out", "ftp://bucket/cache"])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "cache.json").write_text('{"schema_version": 3}')
    assert "no identity" in refuse(prune, [str(videos), "--out", str(tmp_path / "c")])
    assert "no identity" in refuse(inspect, [str(tmp_path / "c")])


def test_senseless_seed_and_decoder(refuse, videos, tmp_path):
    out = ["--out", str(tmp_path / "c")]
    assert "--seed must be at least 0" in refuse(prune, [str(videos), *out, "--seed", "-1"])
    assert "no decoder" in refuse(prune, [str(videos), *out, "--decoder", "json:dumps"])
    said = refuse(prune, [str(videos), *out, "--decoder", "decrod"])
    assert "--decoder decrod: unknown (did you mean decord?); known: auto, pyav," in said


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_nvdec_without_a_gpu_is_refused_before_ray_starts(videos, tmp_path, monkeypatch, capsys, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_given, **_more: pytest.fail("Ray was started"))
    argv = [str(videos), "--out", str(tmp_path / "c"), "--decoder", "nvdec", "--device", device]
    assert prune.main(argv) == 2
    assert "--decoder nvdec needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("frames", [["--num-frames", "1"], ["--fps", "1", "--max-frames", "1"]])
def test_fewer_frames_than_the_model_takes(refuse, videos, tmp_path, frames):
    argv = [str(videos), "--out", str(tmp_path / "c"), "--model", "tiny-qwen3-vl", *frames]
    assert "no video of fewer than 2 sampled frames" in refuse(prune, argv)


def test_an_unknown_family_is_told_the_nearest(refuse, videos, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_mini"}))
    text = refuse(prune, [str(videos), "--out", str(tmp_path / "c"), "--model", str(tmp_path)])
    assert "'qwen3_vl_mini'" in text and "The nearest is qwen3_vl_moe: Qwen/Qwen3-VL-30B-A3B" in text


@pytest.mark.slow
def test_a_ray_that_cannot_start_is_one_line_with_the_remedy(videos, tmp_path):
    place = "/tmp/" + "x" * 120  # too long for its sockets
    done = run("jobs.prune", str(videos), "--out", str(tmp_path / "c"), RAY_TMPDIR=place)
    shutil.rmtree(place, ignore_errors=True)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and " failed: Ray cannot be started on this machine: OSError: " in last, done.stdout
    assert "Traceback" not in done.stdout
