"""What makes no sense is refused with exit code 2, by name, before a model loads or Ray starts."""

import json
import shlex
import shutil

import pytest
import ray
import torch

from jobs import inspect, prune, recode, reprune
from tests.builders.runs import clips, forbid_ray, run, said_by

LLAVA = "--pruner-param variant=llava"
CODE = {"model_type": "mine", "auto_map": {"AutoModel": "model.Mine"}}
MODELS = {"gpt": {"model_type": "gpt2"}, "code": CODE, "mini": {"model_type": "qwen3_vl_mini"}}
LISTS = {
    "outside": '{"video_id": "in", "uri": "a.mp4"}\n{"video_id": "out", "uri": "/etc/hostname"}',
    "surrogate": '{"video_id": "\\ud800", "uri": "a.mp4"}',
    "null": '{"video_id": "a", "uri": "a\\u0000.mp4"}',
    "late": '{"video_id": "a", "uri": "a.mp4", "start_s": 1' + "0" * 400 + "}",
}


@pytest.fixture
def refuse(monkeypatch, capsys, tmp_path):
    """Run a command that must be refused in a folder of videos, models and lists; an attempt to start Ray would fail.

    Nothing is written there. Returns why it is refused.
    """
    forbid_ray(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("videos", "pickled", "old", "bare", *MODELS):
        (tmp_path / name).mkdir()
    shutil.copy(clips()[0], tmp_path / "videos")
    for name, config in {**MODELS, "pickled": {"model_type": "llava_onevision"}}.items():
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    (tmp_path / "code" / "model.py").write_text("raise SystemExit('the code was run')")
    for name, version in (("old", 99), ("bare", 3)):
        (tmp_path / name / "cache.json").write_text(json.dumps({"schema_version": version}))
    for name, lines in LISTS.items():
        (tmp_path / f"{name}.jsonl").write_text(lines)
    (tmp_path / "notes.txt").write_text("no video")

    def check(command, argv: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert command.main(shlex.split(argv)) == 2
        assert sorted(tmp_path.rglob("*")) == before
        return " ".join(capsys.readouterr().err.split())

    return check


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ("nowhere", "nowhere: no such folder"),
        ("x" * 300, "xxx: cannot be read: File name too long"),
        ("notes.txt --dry-run", "notes.txt is not a video container; it looks like text; name a video"),
        ("outside.jsonl --dry-run", "1 of 2 videos may not be read, so nothing was started: 1: the path resolves"),
        ("outside.jsonl --dry-run", "--video-root /etc, or correct the list"),
        ("surrogate.jsonl", "video_id is not valid text"),
        ("null.jsonl", "uri is not valid text"),
        ("late.jsonl", "not a number of seconds"),
        ("videos --pruner magic", "gstep"),
        ("videos --pruner-param gamma=1", "alpha"),
        ("videos --pruner-param alpha=2", "alpha"),
        ("videos --max-pixels 1000", "one size"),
        ("videos --max-pixels 10 --model tiny-qwen3-vl", "at most 10 pixels"),
        ("videos --min-pixels 0", "--min-pixels must be at least 1"),
        ("videos --num-frames 1 --model tiny-qwen3-vl", "no video of fewer than 2 sampled frames"),
        ("videos --fps 1 --max-frames 1 --model tiny-qwen3-vl", "no video of fewer than 2 sampled frames"),
        ("videos --seed -1", "--seed must be at least 0"),
        ("videos --decoder json:dumps", "not a decoder"),
        ("videos --decoder decrod", "--decoder decrod: unknown (did you mean decord?); known: auto, pyav,"),
        ("videos --out videos", "is no cache"),
        ("videos --out notes.txt", "is no cache"),
        ("videos --out notes.txt/sub", "cannot be made"),
        ("videos --out ftp://bucket/cache", "is a folder, s3://"),
        ("videos --out old", "schema version 99"),
        ("videos --out bare", "no identity"),
    ],
)
def test_lists_options_and_places_that_make_no_sense(refuse, argv, why):
    assert why in refuse(prune, argv)


def test_a_cache_without_identity_is_not_shown(refuse):
    assert "no identity" in refuse(inspect, "bare")


@pytest.mark.parametrize(
    ("pruner", "why"),
    [
        ("cdpruner", "--pruner none, then python -m jobs.generate --pruner cdpruner"),
        ("fastv", "--pruner none, then python -m jobs.generate --pruner fastv"),
        (f"visionzip {LLAVA} --model tiny-qwen2-5-vl", "qwen2_5_vl does not give token_attention, token_key from the"),
        (
            f"visionzip {LLAVA} --model tiny-qwen3-vl",
            "models of type llava_onevision do, and none, random, uniform",
        ),
        (f"fastvid {LLAVA} --model tiny-qwen3-vl", "qwen3_vl does not give frame_feature, token_"),
        ("flashvid --model tiny-qwen2-5-vl", "--pruner flashvid: the encoder of qwen2_5_vl does not give token_"),
        ("holitom --model tiny-qwen3-vl", "--pruner holitom: the encoder of qwen3_vl does not give token_attention"),
        ("fastvid --pruner-param variant=qwen", "models of type qwen2_5_vl or qwen3_vl or"),
        ("fastvid", "name it with --siglip, for the published models google/siglip-so400m-patch14-384"),
        ("fastvid --siglip nowhere/at/all", "'nowhere/at/all' is no folder on this machine"),
        ("gstep --siglip tiny", "--siglip is for methods that ask SigLIP's pooling head; this --pruner"),
        ("fastvid --siglip tiny --model tiny-qwen3-vl", "this --pruner fastvid does not"),
    ],
)
def test_a_pruner_that_needs_a_question_or_what_the_encoder_does_not_give(refuse, pruner, why):
    assert why in refuse(prune, f"videos --pruner {pruner}")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("gpt", "gpt2"),
        ("gpt", "no class of gpt2 that takes videos and text"),
        ("tiny --family mine", "the family 'mine' is neither generic nor your own class as module:Class"),
        ("tiny --family json:loads", "the family 'json:loads' is not a subclass of gstep.backbones.ModelFamily"),
        ("tiny --family nowhere:Mine", "cannot be imported: ModuleNotFoundError"),
        ("pickled", "safetensors"),
        ("code", "Code that comes with a checkpoint (auto_map) is never run"),
        ("mini", "The nearest is qwen3_vl_moe: Qwen/Qwen3-VL-30B-A3B"),
    ],
)
def test_models_that_are_not_known_or_not_safe(refuse, model, why):
    assert why in refuse(prune, f"videos --model {model}")


@pytest.mark.parametrize("command", [recode, reprune])
def test_a_rewriting_says_what_its_source_is_and_why_its_store_failed(refuse, tmp_path, capsys, command):
    assert "notes.txt: not a pruned-token cache" in refuse(command, "notes.txt --out made")
    (tmp_path / "odd" / "cache.json").mkdir(parents=True)
    assert "failed: [Errno 21] Is a directory" in said_by(command, "odd", "--out", "made", code=1)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_nvdec_without_a_gpu_is_refused_before_ray_starts(tmp_path, monkeypatch, capsys, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_given, **_more: pytest.fail("Ray was started"))
    argv = [str(clips()[0]), "--out", str(tmp_path / "c"), "--decoder", "nvdec", "--device", device]
    assert "--decoder nvdec needs a GPU" in said_by(prune, *argv, code=2)


@pytest.mark.slow
def test_a_ray_that_cannot_start_is_one_line_with_the_remedy(tmp_path):
    place = "/tmp/" + "x" * 120  # too long for its sockets
    done = run("jobs.prune", str(clips()[0]), "--out", str(tmp_path / "c"), RAY_TMPDIR=place)
    shutil.rmtree(place, ignore_errors=True)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and " failed: Ray cannot be started on this machine: OSError: " in last, done.stdout
    assert "Traceback" not in done.stdout
