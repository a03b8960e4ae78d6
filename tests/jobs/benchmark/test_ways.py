"""The benchmarks of decoding, reading, selecting and of the family generic measure every way; none asserts a time."""

import sys

import numpy as np
import pytest
import torch

from gstep.selection.reference import density_guided_fps
from jobs.benchmark import generic
from jobs.benchmark.decode import FLOOR, IN_CHILD, IN_PROCESS, Clip, decode_needed_frames, make_clip
from jobs.benchmark.read import make_row
from jobs.benchmark.selection import count_loop_steps, select_by_loop
from jobs.benchmark.tokens import INPUTS
from pipeline.video.containers import sniff
from pipeline.video.probe import probe

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
