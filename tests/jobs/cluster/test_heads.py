"""Clusters started by the two commands of the page, and a run that goes on under another head."""

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import time
import urllib.request

import pytest

from pipeline import TokenCache
from tests.jobs.faults import files, tiny_videos
from tests.jobs.jobs import assert_complete, clips, environment
from tests.jobs.processes import assert_all_gone, family
from tests.jobs.ray_cluster import RAY, Cluster
from tests.paths import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PRUNE = ("python", "-m", "jobs.prune")
PAGE = ROOT / "jobs" / "cluster" / "README.md"
PLACES = ("--port=", "--address=", "--metrics-export-port=")  # of which this machine has others


def test_a_run_goes_on_under_another_head(tmp_path):
    """The machine of the first one is lost in the middle: its head, its driver, its workers."""
    ids = tiny_videos(tmp_path / "videos", 40)
    cache = tmp_path / "c"
    decoder = ("--decoder", "tests.jobs.hostile:SlowDecoder", "--decode-workers", "1")
    command = (*PRUNE, str(tmp_path / "videos"), "--out", str(cache), "--num-frames", "2", *decoder)
    options = ("--flush-seconds", "1", "--log-interval", "1")
    with Cluster(cpus=2, PYTHONPATH=str(ROOT)) as first:
        assert first.submit(*command, *options, options=("--no-wait", "--submission-id", "one")).returncode == 0
        wait_until(lambda: files(cache, "videos"), lambda: first.logs("one"), meanwhile=lambda: time.sleep(0.1))
        lost = [first.head_pid, *family(first.head_pid)]
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        assert_all_gone(lost[1:])
    kept = TokenCache(cache).video_ids
    assert 0 < len(kept) < len(ids)
    with Cluster(cpus=2, PYTHONPATH=str(ROOT)) as second:
        done = second.submit(*command, *options)
    assert done.returncode == 0, done.stdout
    assert f"{len(kept)} of {len(ids)} videos are in the cache already" in done.stdout
    assert_complete(cache, ids)
    ended = sorted(json.loads(file.read_text())["status"] for file in (cache / "runs").glob("*.json"))
    assert ended == ["finished", "running"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A head and a worker by the page's commands, which find the token in a file of the home directory."""
    home = tmp_path_factory.mktemp("home")
    made = environment(HOME=str(home), RAY_AUTH_MODE=None)
    subprocess.run([RAY, "get-auth-token", "--generate"], env=made, check=True, capture_output=True)
    (home / ".ray" / "auth_token").chmod(0o600)
    head, worker = started()
    ports = free(2)
    with Cluster(
        cpus=1, also=(*head, f"--metrics-export-port={ports[0]}"), HOME=str(home), RAY_AUTH_MODE="token"
    ) as cluster:
        cluster.add_node(cpus=1, also=(*worker, f"--metrics-export-port={ports[1]}"))
        yield cluster, ports


def started():
    """The options of the page's two commands, without those that name a place."""
    lines = re.findall(r"^RAY_AUTH_MODE=token (ray start .*)$", PAGE.read_text(), re.MULTILINE)
    head, worker = (shlex.split(line)[2:] for line in lines)
    assert head[0] == "--head" and worker[0] == "--address=HEAD:6379" and "--port=6379" in head
    return [[word for word in words if word != "--head" and not word.startswith(PLACES)] for words in (head, worker)]


def free(count):
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def test_a_token_is_made_and_ray_leaves_it_readable_by_others(tmp_path):
    """Why the page has chmod."""
    made = environment(HOME=str(tmp_path), RAY_AUTH_MODE=None)
    subprocess.run(
        ["sh", "-c", f"umask 022; {RAY} get-auth-token --generate"], env=made, check=True, capture_output=True
    )
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text()) >= 32 and stat.S_IMODE(token.stat().st_mode) == 0o644


def test_two_commands_make_a_cluster_for_who_has_the_token(bare, tmp_path):
    cluster, _ = bare
    argv = (*PRUNE, str(clips()[1]), "--out", str(tmp_path / "c"), "--num-frames", "2")
    stranger = cluster.submit(*argv, HOME=str(tmp_path))
    assert stranger.returncode == 1 and "oken" in stranger.stdout
    done = cluster.submit(*argv, options=("--runtime-env-json", json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})))
    assert done.returncode == 0, done.stdout
    assert "2 CPUs and 0 GPUs on 2 nodes" in done.stdout
    assert_complete(tmp_path / "c", [clips()[1].name])
    logs = cluster.folder / "session_latest" / "logs"  # where the page sends people
    assert (logs / "raylet.out").is_file() and list(logs.glob("worker-*.err"))


def test_prometheus_finds_every_node(bare):
    cluster, ports = bare
    (listing,) = cluster.folder.glob("prom_metrics_service_discovery.json") or [None]
    wait_until(lambda: len(targets(listing)) >= 2, lambda: targets(listing))
    assert {int(target.rpartition(":")[2]) for target in targets(listing)} >= set(ports)
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert b"\nray_" in answer.read()


def targets(listing):
    return [target for group in json.loads(listing.read_text()) for target in group["targets"]]
