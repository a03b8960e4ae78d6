"""What makes no sense is refused with exit code 2, by name, before a model loads or Ray starts."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import ray
import torch

from jobs import compact, doctor, evaluate, generate, inspect, merge, prune, recode, remove, reprune, testbed, verify
from jobs.__main__ import main
from tests.builders.answers import tiny_cache
from tests.builders.runs import clips, forbid_ray, run, said_by
from tests.pipeline.rewrite.test_merge import cache_of

LLAVA = "--pruner-param variant=llava"
REMOVE = "--reason x --ids"
FILM = "videos/bigbuckbunny.mp4"
CODE = {"model_type": "mine", "auto_map": {"AutoModel": "model.Mine"}}
TYPES = {"gpt": "gpt2", "mini": "qwen3_vl_mini", "pickled": "llava_onevision"}
MODELS = {"code": CODE, **{name: {"model_type": model_type} for name, model_type in TYPES.items()}}
FILES = {
    "outside.jsonl": '{"video_id": "in", "uri": "a.mp4"}\n{"video_id": "out", "uri": "/etc/hostname"}',
    "surrogate.jsonl": '{"video_id": "\\ud800", "uri": "a.mp4"}',
    "null.jsonl": '{"video_id": "a", "uri": "a\\u0000.mp4"}',
    "listed.jsonl": '{"video_id": "a", "uri": "a.mp4"}\n',
    **{"a.mp4": "no video", "notes.txt": "no video", "empty.ids": "\n \n", "ids": "a"},
    "code/model.py": "raise SystemExit('the code was run')",
    **{f"{name}/cache.json": f'{{"schema_version": {version}}}' for name, version in (("old", 99), ("bare", 3))},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder of videos, models, lists and two caches, of which one is of the tiny model."""
    place = tmp_path_factory.mktemp("place")
    for name in ("videos", "old", "bare", *MODELS):
        (place / name).mkdir()
    shutil.copy(clips()[0], place / "videos")
    for name, config in MODELS.items():
        (place / name / "config.json").write_text(json.dumps(config))
    (place / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    for name, text in FILES.items():
        (place / name).write_text(text)
    tiny_cache(place / "tiny-cache", ("a",), failed=("bad.mp4",))
    cache_of(place / "cache", {"bikes.mp4": 1})
    return place


@pytest.fixture
def refuse(monkeypatch, place):
    """Run a command there that must be refused and write nothing, with Ray forbidden; returns why."""
    forbid_ray(monkeypatch)
    monkeypatch.chdir(place)

    def check(command, argv: str) -> str:
        before = sorted(place.rglob("*"))
        said = said_by(command, *shlex.split(argv), code=2)
        assert sorted(place.rglob("*")) == before
        return said

    return check


REFUSED = {
    prune: [
        ("nowhere", "nowhere: no such folder"),
        ("x" * 300, "xxx: cannot be read: File name too long"),
        ("notes.txt --dry-run", "notes.txt is not a video container; it looks like text; name a video"),
        ("outside.jsonl --dry-run", "1 of 2 videos may not be read, so nothing was started: 1: the path resolves"),
        ("surrogate.jsonl", "video_id is not valid text"),
        ("null.jsonl", "uri is not valid text"),
        ("videos --pruner magic", "gstep"),
        ("videos --pruner-param gamma=1", "alpha"),
        ("videos --max-pixels 1000", "one size"),
        ("videos --min-pixels 0", "--min-pixels must be at least 1"),
        ("videos --fps 1 --max-frames 1 --model tiny-qwen3-vl", "no video of fewer than 2 sampled frames"),
        ("videos --decoder json:dumps", "not a decoder"),
        ("videos --decoder decrod", "--decoder decrod: unknown (did you mean decord?); known: auto, pyav,"),
        ("videos --out videos", "is no cache"),
        ("videos --out notes.txt/sub", "cannot be made"),
        ("videos --out ftp://bucket/cache", "is a folder, s3://"),
        ("videos --out old", "schema version 99"),
        ("videos --out bare", "no identity"),
        ("videos --pruner cdpruner", "--pruner none, then python -m jobs.generate --pruner cdpruner"),
        (
            f"videos --pruner visionzip {LLAVA} --model tiny-qwen2-5-vl",
            "qwen2_5_vl does not give token_attention, token_key from the",
        ),
        ("videos --pruner fastvid --pruner-param variant=qwen", "models of type qwen2_5_vl or qwen3_vl or"),
        ("videos --pruner fastvid", "name it with --siglip, for the published models google/siglip-so400m-patch14-384"),
        ("videos --pruner fastvid --siglip nowhere/at/all", "'nowhere/at/all' is no folder on this machine"),
        ("videos --pruner fastvid --siglip tiny --model tiny-qwen3-vl", "this --pruner fastvid does not"),
        ("videos --model gpt", "no class of gpt2 that takes videos and text"),
        ("videos --family mine", "the family 'mine' is neither generic nor your own class as module:Class"),
        ("videos --family json:loads", "the family 'json:loads' is not a subclass of gstep.backbones.ModelFamily"),
        ("videos --model pickled", "safetensors"),
        ("videos --model code", "Code that comes with a checkpoint (auto_map) is never run"),
        ("videos --model mini", "The nearest is qwen3_vl_moe: Qwen/Qwen3-VL-30B-A3B"),
        ("list.jsonl", "did you mean listed.jsonl?"),
        ("listed.jsonl --model shape", "did you mean shapes?"),
        ("listed.jsonl --pruner gstpe", "did you mean gstep?"),
        ("listed.jsonl --pruner-param alhpa=1", "did you mean alpha?"),
        ("listed.jsonl --evidence image_embeding", "did you mean image_embedding?"),
        ("--config none.yaml", "none.yaml"),
    ],
    evaluate: [("--benchmark shpes --data . --out made", "did you mean shapes?")],
    generate: [("tiny-cache --questions list.jsonl --out made", "did you mean listed.jsonl?")],
    doctor: [
        ("--num-frames 0", "--num-frames must be at least 1"),
        ("--dry-run", "--plan and --dry-run are for jobs.prune"),
    ],
    verify: [
        ("nowhere", "no cache.json"),
        ("cache --live 1 --video-root /", "which model"),  # its runs left no record
        ("cache --model tiny", "--model"),
        ("cache --live 1", "--live"),
        ("cache --video-root /", "--video-root"),
        ("cache --repair --live 1 --video-root /", "--repair"),
        ("cache --log-interval nan", "--log-interval"),
    ],
    compact: [
        ("nowhere", "not a pruned-token cache"),
        *((f"cache --keep-minutes {minutes}", "must be from 0 to 100,000,000") for minutes in ("nan", "-5", "1e12")),
    ],
    remove: [
        (f"nowhere {REMOVE} ids", "not a pruned-token cache"),
        (f"cache {REMOVE} empty.ids", "names no video"),
        (f"cache {REMOVE} listed.jsonl", "it takes an id a line"),
        (f"cache {REMOVE} none.ids", "cannot be read"),
        ("cache --reason ' ' --ids ids", "--reason must be a text"),
        ("cache --reason x", "are required: --ids"),
    ],
    merge: [
        ("cache tiny-cache --out made", "not made alike"),
        ("cache --out videos", "is no cache"),
        ("cache --out ftp://host/place", "cache is a folder"),
        ("cache --out cache", "name two caches"),
        ("cache cache/ --out ./cache", "name two caches"),
    ],
    inspect: [
        ("cache bike.mp4", "did you mean bikes.mp4?"),
        ("tiny-cache bad.mp4 --html page.html", "'bad.mp4' failed: corrupt: damaged"),
        ("cache bikes.mp4 --html nowhere/page.html", "nowhere does not exist"),
        ("cache bikes.mp4 --html .", "is a folder"),
        ("cache --retention-ratio 0.1", "--retention-ratio needs a video"),
        ("cache --video-root /", "--video-root goes with --html"),
        ("cache bikes.mp4 --watch", "--watch cannot be combined with an ID"),
        ("cache --num-frames 3", "--num-frames goes with --method"),
        ("cache v --retention-ratio .25 .1", "several values of --retention-ratio go with --method"),
        ("cache --retention-ratio x", "argument --retention-ratio: invalid share value: 'x'"),
        ("gone.mp4 --method gstep", "io: "),
        (f"{FILM} --method fastv", "--method fastv: it selects inside the language model, anew for every question"),
        (f"{FILM} --method gstep --video-root /", "is not a cache"),
        (". --method gstep", "is a folder, not a video file"),
        (f"{FILM} --method visionzip --model tiny-internvl", "--method visionzip: the encoder of internvl"),
    ],
    **{command: [("notes.txt --out made", "notes.txt: not a pruned-token cache")] for command in (recode, reprune)},
    testbed: [
        ("", "the following arguments are required: make"),
        ("make", "the following arguments are required: DIR"),
        ("make made --hardness hard", "invalid choice: 'hard'"),
        ("make made --videos 10001", "--videos must be 1 to 10000, got 10001"),
        ("make made --picture nowhere/p.png", "there is no folder nowhere"),
        ("make made --videos 3 --seed 100", "--seed must be 0 to 99 on the split development, got 100"),
        ("make notes.txt", "is a file: name a folder"),
    ],
}


@pytest.mark.parametrize(
    ("command", "argv", "why"), [(command, *row) for command, rows in REFUSED.items() for row in rows]
)
def test_what_makes_no_sense_is_refused_by_name_and_writes_nothing(refuse, command, argv, why):
    assert why in refuse(command, argv)


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        ("prnue", "prune"),
        ("benchmark pipelin", "pipeline"),
        ("prune --device cud", "cuda"),
        ("prune --retention-ration 0.2", "--retention-ratio"),
        ("prune --drt-run=1", "--dry-run"),
    ],
)
def test_a_mistyped_command_flag_or_choice_gets_the_likely_one_in_two_lines(argv, near, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv.split())
    said = capsys.readouterr().err
    assert f"(did you mean {near}?)" in said and len(said.splitlines()) == 2


@pytest.mark.parametrize("command", [recode, reprune])
def test_a_rewriting_says_why_its_store_failed(tmp_path, command):
    (tmp_path / "odd" / "cache.json").mkdir(parents=True)
    assert "failed: [Errno 21] Is a directory" in said_by(command, tmp_path / "odd", "--out", "made", code=1)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_nvdec_without_a_gpu_is_refused_before_ray_starts(refuse, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert "--decoder nvdec needs a GPU" in refuse(prune, f"videos --decoder nvdec --device {device}")


@pytest.mark.slow
def test_a_ray_that_cannot_start_is_one_line_with_the_remedy(tmp_path):
    place = "/tmp/" + "x" * 120  # too long for its sockets
    done = run("jobs.prune", str(clips()[0]), "--out", str(tmp_path / "c"), RAY_TMPDIR=place)
    shutil.rmtree(place, ignore_errors=True)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 1 and " failed: Ray cannot be started on this machine: OSError: " in last, done.stdout
    assert "Traceback" not in done.stdout
