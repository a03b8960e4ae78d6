"""The plan of a run: videos are probed, nothing is started or written."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import ray
from rich.console import Console

from gstep.backbones import ModelSource, family_of
from jobs import prune
from pipeline.errors import UsageError
from pipeline.inputs.forms import FORMS
from pipeline.inputs.tar_and_zip import Tar
from pipeline.plan.render import list_rows
from pipeline.prune.config import PruneConfig
from pipeline.prune.plan import plan_run
from pipeline.video.sampling import Sampling, choose_frames
from tests.builders.archives import write_tar
from tests.builders.clips import write_clip
from tests.gstep.hub_configs import LLMS, PREPROCESSOR
from tests.paths import ROOT


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "videos").mkdir()
    for name, size in (("a.mp4", (64, 96)), ("b.mp4", (64, 96)), ("c.mp4", (96, 128))):
        write_clip(tmp_path / "videos" / name, size=size)
    return tmp_path


def planned(folder: Path, **options):
    options = {"videos": [str(folder / "videos")], "num_frames": 4, "device": "cpu", **options}
    return plan_run(PruneConfig(plan=True, out=str(folder / "c"), **options), Console(quiet=True))


def test_a_plan_decodes_videos_and_touches_nothing(folder):
    before = sorted(folder.rglob("*"))
    plan = planned(folder)
    assert sorted(folder.rglob("*")) == before and not ray.is_initialized()
    assert plan.videos == 3 and plan.failed_share == 0
    assert 0 < plan.decode_core_s.low <= plan.decode_core_s.high < 30
    files = sum(path.stat().st_size for path in (folder / "videos").iterdir())
    assert plan.input_bytes.expected == pytest.approx(files) and plan.video_s.expected > 0
    assert plan.output_bytes.expected == 3 * round(0.25 * 4 * 196) * (64 * 2 + 12)
    assert "3 of 3 videos were decoded" in plan.notes[0] and "3 of them were encoded here" in plan.notes
    assert 0 < plan.encode_core_s.low < plan.encode_core_s.high < 30


def test_some_of_the_videos_are_probed_and_the_rest_is_inferred(folder):
    """The bytes of the input are those that the index knows."""
    clip = (folder / "videos" / "a.mp4").read_bytes()
    write_tar(folder / "a.tar", {f"{number}.mp4": clip + bytes(1000 * number**2) for number in range(5)})
    plan = planned(folder, videos=[str(folder / "a.tar")], probe=2)
    assert plan.videos == 5 and tuple(plan.input_bytes) == pytest.approx((5 * len(clip) + 1000 * 30,) * 3)
    assert "2 of 5 videos were decoded" in plan.notes[0]
    assert "all of them are 96 x 64: other sizes were not measured" in plan.notes
    elsewhere = planned(folder, probe=2, gpus=8, gpu_type="A100", device="auto")
    assert elsewhere.gpu_s.expected > 0 and any("of the GPU's peak" in note for note in elsewhere.notes)


def test_a_limit_opens_the_tars_that_its_videos_lie_in_and_keeps_no_index(folder, monkeypatch):
    opened, clip = [], (folder / "videos" / "a.mp4").read_bytes()
    (folder / "tars").mkdir()
    for number in range(3):
        write_tar(folder / "tars" / f"{number}.tar", {f"{name}.mp4": clip for name in "ab"})

    class Noted(Tar):
        def members(self, asked):
            opened.append(self._file.uri[-5:])
            return super().members(asked)

    monkeypatch.setitem(FORMS, ".tar", Noted)
    for limit, tars in ((2, 1), (3, 2), (None, 3)):
        plan = planned(folder, videos=[str(folder / "tars")], limit=limit)
        assert (plan.videos, sorted(opened)) == (limit or 6, [f"{number}.tar" for number in range(tars)])
        opened.clear()
    assert not (folder / "c").exists()
    write_tar(folder / "none.tar", {"a.txt": b"no video"})
    with pytest.raises(UsageError, match="none of the 1 archives holds a video"):
        planned(folder, videos=[str(folder / "none.tar")], limit=1)


def test_a_plan_says_which_probed_videos_a_limit_gives_other_frames(folder):
    write_clip(folder / "videos" / "long.mp4", count=200, fps=10)
    options = {"model": "tiny-qwen2-5-vl", "num_frames": None, "fps": 1.0}
    notes = planned(folder, max_frames=8, **options).notes
    assert [note.partition(" (")[0] for note in notes if note.startswith("of the decoded videos, ")] == [
        "of the decoded videos, 1 video was capped at 8 frames",
        "of the decoded videos, 3 short videos got more frames than --fps 1 gives, since this model takes at least 4 "
        "where a video has them",
    ]
    assert not [note for note in planned(folder).notes if "frames" in note]


SLOW_DECODER = """
import time

from pipeline.video.decoders import PyavDecoder


class Slow(PyavDecoder):
    def read(self, indices):
        time.sleep(0.2)
        yield from super().read(indices)
"""


def test_a_decoder_that_is_held_up_takes_no_more_core_seconds_and_widens_the_range(folder, monkeypatch):
    """It sleeps, as a decoder does whose core other programs have."""
    (folder / "slow_decoder.py").write_text(SLOW_DECODER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # of the process that decodes
    plan = planned(folder, decoder="slow_decoder:Slow")
    assert plan.decode_core_s.low < plan.decode_core_s.expected < 1.5 < plan.decode_core_s.high
    (note,) = [note for note in plan.notes if note.startswith("a run's core-seconds")]
    assert "those of the probe times 1.1 (0.7 to " in note and "share the cores" in note
    assert any(note.startswith("other programs or the disk held decoding up here to ") for note in plan.notes)
    elsewhere = planned(folder, decoder="slow_decoder:Slow", probe=1, gpus=8, gpu_type="A100", device="auto")
    assert any("times 1.1 (0.7 to 3)" in note for note in elsewhere.notes)
    assert not any("held decoding up" in note for note in elsewhere.notes)


def test_unreadable_videos_are_a_rate(folder):
    (folder / "videos" / "d.mp4").write_bytes(b"no video")
    assert planned(folder).failed_share == 0.25
    for name in "abc":
        (folder / "videos" / f"{name}.mp4").unlink()
    with pytest.raises(UsageError, match=r"none of the 1 probed videos can be read, e\.g\. d\.mp4: "):
        planned(folder)


def test_a_corpus_and_cluster_that_are_not_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = "--plan --json --gpus 64 --gpu-type A100 --decode-cores 768 --videos 2e6 --seconds 60 --model tiny"
    assert prune.main([*argv.split(), "--price", "gpu-hour=1.8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["videos"], plan["cluster"]["cores"], plan["exit_code"]) == (2_000_000, 768, 0)
    assert plan["wall_s"]["low"] < plan["wall_s"]["expected"] < plan["wall_s"]["high"]
    assert plan["output_bytes"]["expected"] == pytest.approx(2e6 * 1568 * (64 * 2 + 12))
    assert plan["cost"]["total"]["expected"] > 0 and plan["bottleneck"] in plan["stage_s"]
    assert not list(tmp_path.iterdir())


CORPUS = {"corpus_videos": 1001, "seconds": 60, "gpus": 64, "gpu_type": "A100"}


def planned_corpus(**options):
    return plan_run(PruneConfig(plan=True, **options), Console(quiet=True))


@pytest.mark.parametrize(
    ("options", "videos", "gpus"),
    [
        ({"limit": 100, "max_gpus": 8}, 100, 8),
        ({"shard": "1/4", "encode_workers": 2}, 251, 2),
        ({"shard": "1/4", "limit": 10, "gpus": 0, "gpu_type": None, "max_gpus": 8}, 10, 0),
    ],
)
def test_the_options_of_a_run_that_make_it_smaller_count_in_a_plan_for_elsewhere(options, videos, gpus):
    plan = planned_corpus(**{**CORPUS, **options})
    assert (plan.videos, plan.cluster.gpus) == (videos, gpus)
    assert not [note for note in plan.notes if "is ignored" in note]


def test_what_a_plan_does_not_reckon_with_is_named():
    options = {**CORPUS, "gpus": 0, "gpu_type": None, "decode_cores": 8, "decode_workers": 4, "encode_workers": 1}
    notes = planned_corpus(**options).notes
    assert "--decode-workers 4 is ignored: all 8 vCPUs decode" in notes
    assert "--encode-workers 1 is ignored: all 8 vCPUs encode" in notes
    notes = planned_corpus(**CORPUS, snap_to_keyframes=2.0, decoder="nvdec").notes
    ignored = ["--snap-to-keyframes is ignored", "--decoder nvdec is ignored"]
    assert [note.partition(":")[0] for note in notes[1:3]] == ignored


def test_a_corpus_whose_videos_the_model_refuses_is_planned_in_a_smaller_size():
    options = {**CORPUS, "model": "tiny-qwen3-vl", "family": "generic", "seconds": 600, "fps": 2.0, "max_frames": 768}
    plans = [planned_corpus(**options, **size) for size in ({}, {"size": "854x480"})]
    assert plans[0].output_bytes == plans[1].output_bytes and plans[0].decode_core_s == plans[1].decode_core_s
    assumed, note, *others = plans[0].notes
    assert "854 x 480" in assumed and (assumed, *others) == plans[1].notes
    assert "videos of 1920 x 1080 become rows of class unsupported: 768 frames of 1920x1080 pixels" in note


def test_a_type_of_gpu_needs_their_number_on_a_machine_without_any(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UsageError, match=r"--gpu-type A100: this machine has no GPU; give their number with --gpus N"):
        planned_corpus(**{**CORPUS, "gpus": None})


def test_in_a_container_the_cores_are_those_of_its_limit(monkeypatch):
    """As Ray counts them, which a run of this machine starts decoders for."""
    monkeypatch.setattr("ray._private.utils._get_docker_cpus", lambda: 1.0)
    plan = planned_corpus(corpus_videos=9, seconds=60, device="cpu")
    assert plan.cluster.cores == 1.0


@pytest.mark.parametrize(("model", "patches"), [("tiny", 1), ("tiny-qwen3-vl", 2)])
def test_short_videos_are_planned_with_the_least_frames_of_the_family(model, patches):
    options = {"pruner": "none", "retention_ratio": 1.0, "corpus_videos": 10, "seconds": 1, "size": "64x64"}
    family = family_of(ModelSource.resolve(model))
    _, n_tokens = family.token_counts(4, *family.preprocessor().target_size(4, 64, 64))
    static = family.static()
    a_token = 12 + 2 * static.hidden_size * (1 + static.deepstack_levels)
    assert planned_corpus(model=model, fps=1.0, **options).output_bytes.expected == 10 * patches * n_tokens * a_token


@pytest.mark.parametrize(("seconds", "fps", "n_frames"), [(10.9, 1.0, 11), (60, 0.29, 18), (1e300, 1e300, 32)])
def test_a_plan_counts_the_frames_of_a_video_as_sampling_does(seconds, fps, n_frames):
    if seconds < 100:
        timestamps = np.arange(round(30 * seconds)) / 30
        assert len(choose_frames(timestamps, Sampling(None, fps=fps, max_frames=32))) == n_frames
    plan = planned_corpus(corpus_videos=10, seconds=seconds, fps=fps, pruner="none")
    assert plan.output_bytes.expected == 10 * n_frames * 196 * (64 * 2 + 12)


@pytest.mark.parametrize(
    ("model", "options"), [("LLaVA-OneVision-7B", {}), ("Qwen2.5-VL-7B", {"max_pixels": 602112}), ("Qwen3-VL-8B", {})]
)
def test_the_table_of_the_page_is_what_plans_of_the_published_models_print(tmp_path, model, options):
    """For which no weights are needed."""
    still = {"size": {"height": 384, "width": 384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    pixels = json.dumps(PREPROCESSOR.get(LLMS[model]["model_type"], still))
    (tmp_path / "config.json").write_text(json.dumps(LLMS[model]))
    (tmp_path / "preprocessor_config.json").write_text(pixels)
    if model != "Qwen2.5-VL-7B":  # which has the first alone on the hub
        (tmp_path / "video_preprocessor_config.json").write_text(pixels)
    options |= {"corpus_videos": 1e6, "seconds": 60, "gpus": 8, "gpu_type": "A100", "price": ["gpu-hour=1.8"]}
    plan = planned_corpus(model=str(tmp_path), out=str(tmp_path / "c"), **options)
    assert plan.cluster.cores == 8 * 12  # what usually stands beside them
    shown = dict(list_rows(plan))
    (row,) = re.findall(rf"^\| {model} \| 8 \| (.*) \|$", (ROOT / "pipeline/plan/README.md").read_text(), re.MULTILINE)
    wall, bottleneck, gpu_hours, output, cost = row.split(" | ")
    assert (shown["wall time"], shown["output"]) == (wall, output)
    assert shown["bottleneck"].startswith(bottleneck) and shown["cost, per 1000 videos"] == cost
    assert shown["encode"].replace(" h", "").startswith(gpu_hours)
