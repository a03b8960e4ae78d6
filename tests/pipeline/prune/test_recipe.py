"""A request to prune and its list of videos: refused before anything is started, and bound by the cache there."""

import argparse
import math
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

import gstep
from gstep.backbones import BACKBONES
from gstep.checkpoints import tiny
from gstep.evidence import SINGLE_PATCHES
from jobs.frame.flags import add_flags, from_flags
from pipeline.errors import IdentityMismatch, ManifestError, UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.manifest_checks import refuse_forbidden, refuse_other_files
from pipeline.prune.recipe import make_sampling
from pipeline.prune.request import check_request
from pipeline.storage.s3 import Objects
from pipeline.video.sampling import Sampling
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.clips import sample
from tests.builders.manifests import read_manifest, write_jsonl


@pytest.fixture
def request_for(tmp_path):
    """A request to prune one clip into ``tmp_path / "c"``, checked: its Recipe."""
    (tmp_path / "videos").mkdir()
    shutil.copy(sample("bikes.mp4"), tmp_path / "videos")

    def make(**options):
        options = {"pruner": "none", "dtype": "float32", **options}
        config = PruneConfig(videos=[str(tmp_path / "videos")], out=str(tmp_path / "c"), **options)
        return check_request(config, Console()).recipe

    return make


def test_another_evidence_or_other_weights_of_its_head_are_another_cache(request_for, tmp_path):
    asked = {"evidence": ["image_embedding"], "siglip": "tiny"}
    job = request_for(**asked)
    assert job.evidence == {"image_embedding_single_patches": SINGLE_PATCHES}
    assert "evidence" not in request_for().identity("float32")
    store = write_header(tmp_path / "c", identity=job.identity("float32"))
    write_shard(store, "run", encoded("v", random_tokens(0), 1.0, "none"))
    assert request_for(**asked).identity("float32") == job.identity("float32")
    with pytest.raises(IdentityMismatch, match=r"image_embedding_single_patches: the cache has 'single_patches', this"):
        request_for()
    with pytest.raises(IdentityMismatch, match=r"evidence\.token_key_last_layer: the cache has None, this run 'last"):
        request_for(evidence=["image_embedding", "token_key"], siglip="tiny")
    folder = Path(shutil.copytree(tiny.build("tiny-siglip"), tmp_path / "siglip"))
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_model.head.mlp.fc2.bias"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(IdentityMismatch, match="pooling_head: the cache has 'siglip-head:"):
        request_for(**{**asked, "siglip": str(folder)})


ABLATIONS = [
    *(("gstep", f"smoothing={kernel}") for kernel in ("raw", "box", "gaussian")),
    *(("gstep", f"fusion={factors}") for factors in ("temporal", "spatial", "full")),
    *((method, None) for method in ("random", "uniform", "topk", "fps", "gstep")),
]


def test_every_row_of_the_papers_ablations_can_be_asked_for(request_for):
    """Smoothing, fusion and sampling: each is a setting of its own, and each default is GSTEP itself."""
    tokens, chosen = random_tokens(0, (12, 25, 16)), {}
    for method, param in ABLATIONS:
        job = request_for(pruner=method, pruner_param=[] if param is None else [param])
        held = job.identity("float32")["pruner"]
        assert held["method"] == method and (param is None or held["params"][param.split("=")[0]] in param)
        chosen[method, param] = tuple(gstep.prune(tokens, 0.25, method, **job.pruner.params()).index.tolist())
    own = chosen.pop(("gstep", None))
    assert chosen.pop(("gstep", "smoothing=gaussian")) == own == chosen.pop(("gstep", "fusion=full"))
    assert len({own, *chosen.values()}) == 1 + len(chosen) == 9


def test_the_limit_of_frames_is_the_model_familys():
    defaults = {name: backbone.default_max_frames for name, backbone in BACKBONES.items()}
    assert defaults == {name: 768 if name.startswith("qwen") else 32 for name in defaults}
    assert make_sampling(PruneConfig(fps=2.0), 768) == Sampling(None, fps=2.0, max_frames=768)
    assert make_sampling(PruneConfig(), 768) == Sampling(32)


def test_flags_are_converted():
    parser = argparse.ArgumentParser()
    add_flags(parser, PruneConfig)
    argv = "v --fps 0.5 --max-frames 8 --pruner-param alpha=0.3 --pruner-param radius=2"
    config = from_flags(PruneConfig, parser.parse_args(argv.split()))
    assert (config.videos, config.fps, config.max_frames) == (["v"], 0.5, 8)
    assert config.pruner_params() == {"alpha": "0.3", "radius": "2"}
    assert make_sampling(config, 768) == Sampling(None, fps=0.5, max_frames=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retention_ratio": 0.0}, "retention-ratio must be in"),
        ({"retention_ratio": 1.5}, "retention-ratio must be in"),
        ({"retention_ratio": math.nan}, "retention-ratio must be in"),
        ({"num_frames": 0}, "num-frames must be at least 1"),
        ({"fps": -1.0}, "fps must be a positive"),
        ({"fps": 1.0, "num_frames": 4}, "two ways"),
        ({"max_frames": 4}, "goes with --fps"),
        ({"max_failed": "many"}, "count"),
        ({"max_failed": "1.5"}, "share"),
        ({"pruner_param": ["alpha"]}, "NAME=VALUE"),
        ({"videos_per_shard": 0}, "at least 1"),
        ({"target_shard_mb": 0}, "target-shard-mb must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"limit": 2**63}, "limit must be a number below"),
        ({"seed": 10**30}, "seed must be a number below"),
        ({"max_failed": "1e1"}, "--max-failed must be a share"),
        ({"stall_timeout": math.inf}, "stall-timeout must be a positive"),
        ({"stall_timeout": 120.0}, "longer than --decode-timeout 120"),
        ({"decode_timeout": 3600.0}, "--stall-timeout 1800 must be longer"),
        ({"videos": ["videos", " "]}, "videos must be at least one folder"),
        ({"video_root": [""]}, "video-root must be a folder"),
        ({"gpus": 0}, "--gpus goes with --plan"),
        ({"price": ["gpu-hour=1.0"]}, "--price goes with --plan"),
        ({"corpus_videos": 2, "seconds": 1}, "--videos goes with --plan"),
        ({"plan": True, "dry_run": True}, "give one of them"),
        ({"plan": True, "corpus_videos": 1.5, "seconds": 1}, "whole number, at least 1"),
        ({"plan": True, "corpus_videos": 10}, "--videos N and --seconds S"),
        ({"plan": True, "seconds": 10}, "--videos N and --seconds S"),
        ({"plan": True, "corpus_videos": 10, "seconds": 10, "videos": ["here"]}, "leave out here"),
        ({"plan": True, "corpus_videos": 10, "seconds": 10, "size": "big"}, "WIDTHxHEIGHT"),
        ({"plan": True, "gpu_type": "A200"}, "--gpu-type must be one of A100"),
        ({"plan": True, "gpu_type": "A100", "gpus": 0}, "do not go together"),
        ({"plan": True, "device": "cpu", "gpus": 8}, "--device cpu goes with neither --gpus nor --gpu-type"),
        ({"plan": True, "corpus_videos": 10, "seconds": 10, "probe": 2}, "--probe looks at videos that are here"),
        ({"plan": True, "price": ["gpu-hour=-1"]}, "--price must be a positive number"),
        ({"plan": True, "price": ["gpu-hour=much"]}, "--price gpu-hour=much: it is not a number"),
        ({"plan": True, "price": ["day=1"]}, "--price must be of a gpu-hour, a core-hour or a gb-month, got 'day'"),
        ({"plan": True, "probe": 0}, "--probe must be a positive number"),
        ({"max_hours": 0.0}, "--max-hours must be a positive number"),
    ],
)
def test_nonsense_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        PruneConfig(**options)


NOWHERE = Objects(endpoint_url="http://127.0.0.1:1")


def write_list(folder: Path, uris: dict[str, str]) -> Path:
    return write_jsonl(folder / "m.jsonl", [{"video_id": name, "uri": uri} for name, uri in uris.items()])


def refused(manifest: Path, *roots: str) -> str:
    """What is said of a list that is refused."""
    with pytest.raises(ManifestError) as caught:
        refuse_forbidden(read_manifest(str(manifest), roots, NOWHERE), str(manifest))
    return str(caught.value)


def test_videos_outside_are_refused_with_a_root_that_allows_them(tmp_path):
    for name in ("data/a b/one.mp4", "data/a b/c/two.mp4"):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "link.mp4").symlink_to(tmp_path / "data/a b/one.mp4")
    uris = {"one": f"{tmp_path}/data/a b/one.mp4", "two": "../data/a b/c/two.mp4", "link": "link.mp4", "own": "x.mp4"}
    manifest = write_list(folder, uris)
    said = refused(manifest)
    assert f"{manifest}: 3 of 4 videos may not be read, so nothing was started" in said
    assert "3: the path resolves outside the folder that was named" in said and f"e.g. one: {tmp_path}/data" in said
    assert f"Allow that with --video-root '{tmp_path}/data/a b', or correct the list" in said
    refuse_forbidden(read_manifest(str(manifest), [f"{tmp_path}/data/a b"]), "m")


def test_no_root_is_suggested_that_allows_everything_or_nothing(tmp_path):
    uris = {"a": "/etc/hostname", "b": "/usr/bin/env", "c": "http://u:pw@host/c.mp4", "d": "s3://k:s@bucket/d.mp4"}
    said = refused(write_list(tmp_path, uris | {f"scheme {i}": f"x{i}://host/v.mp4" for i in range(4)}))
    assert "8 of 8" in said and "http:// is not read from a manifest" in said and "and 2 other reasons" in said
    assert "Correct the list; or record them as failed and prune the others with --on-forbidden record." in said
    assert "--video-root " not in said.partition("Correct")[2] and "pw" not in said


OTHER_FILES = {
    ".txt": "a",
    ".7z": "a",
    ".mp4": "a",
}


@pytest.mark.parametrize("suffix", OTHER_FILES)
def test_a_single_file_is_judged_by_its_content(tmp_path, suffix):
    file = tmp_path / f"list{suffix}"
    file.write_text(OTHER_FILES[suffix])
    said = rf"{suffix} is not a video.*; name a video, .*manifest .*unpack an archive"
    for named in (str(file), f"{tmp_path}/../{tmp_path.name}/{file.name}", f"file://{file}"):
        with pytest.raises(ManifestError, match=said):
            refuse_other_files(read_manifest(named), named, NOWHERE)
    file.write_bytes(sample("bikes.mp4").read_bytes())
    refuse_other_files(read_manifest(str(file)), str(file), NOWHERE)


def test_a_single_object_of_another_suffix_is_one_request(server):
    objects = server.objects()

    def check(uri: str) -> None:
        manifest = read_manifest(uri, (), objects)
        server.requests.clear()
        refuse_other_files(manifest, uri, objects)

    for key, data in (("v/list.txt", b"a.mp4"), ("v/empty.7z", b"")):
        with pytest.raises(ManifestError, match=r"s3://.*is not a video container; it looks like .*; name a video"):
            check(server.upload(key, data))
    check(server.upload("v/clip", sample("bikes.mp4").read_bytes()))
    assert server.counts() == {"GET": 1}
    check(server.upload("v/named.mp4", b"text"))
    assert server.counts() == {}
