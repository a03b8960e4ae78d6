"""What an operator has of a run: another head on which it goes on, its metrics over HTTP, the cause of its end."""

import json
import os
import re
import signal
import time
import urllib.request
from collections import Counter
from contextlib import suppress

import pytest
import ray

from pipeline import TokenCache
from tests.builders.clusters import growing_ray
from tests.builders.runs import assert_all_gone, committed, environment, family, shut_ray_down_in_the_end
from tests.jobs.faults import Driver, files, tiny_videos
from tests.jobs.hostile import let_through
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def argv_of(folder, decoder, *options):
    argv = [str(folder / "videos"), "--out", str(folder / "c"), "--num-frames", "2", "--decode-workers", "1"]
    return [*argv, "--decoder", f"tests.jobs.hostile:{decoder}", "--log-interval", "1", *options]


def test_a_run_goes_on_under_another_head_whose_port_has_its_metrics(tmp_path):
    """The machine of the first head is lost in the middle: its head, its driver, its workers."""
    ids = tiny_videos(tmp_path / "videos", 8)
    cache = tmp_path / "c"
    argv = argv_of(tmp_path, "PatientDecoder", "--flush-seconds", "1")
    driver = Driver(argv, tmp_path / "log", **environment())  # with a head of its own
    driver.until(lambda: files(cache, "videos"), "the first commit")
    lost = [driver.pid, *family(driver.pid)]
    for pid in lost:
        with suppress(ProcessLookupError):  # it ended with the head
            os.kill(pid, signal.SIGKILL)
    assert driver.wait() == -signal.SIGKILL
    assert_all_gone(lost[1:])
    kept = TokenCache(cache).video_ids
    assert 0 < len(kept) < len(ids)
    bad = ["no-video.mp4", "text.mp4"]
    for name in (*bad, "slow"):  # slow, or the run might end before it is looked at
        (tmp_path / "videos" / name).write_text("no video")
    started = time.time()
    both = ("decode", "encode")  # a port names a metric for a while before it has values
    with growing_ray({"num_cpus": 2, "_system_config": {"metrics_report_interval_ms": 1000}}):
        address = ray.get_runtime_context().gcs_address
        second = Driver(argv, tmp_path / "second", shut_ray_down_in_the_end, RAY_ADDRESS=address)
        meanwhile = wait_until(lambda: scrape(both), lambda: second.output, 240, meanwhile=pause)
        (tmp_path / "videos" / "quick").touch()
        assert second.wait(240) == 0, second.output
        said, n_left = second.output, len(ids) - len(kept)
        counted = {"ok": [n_left], "failed": [2]}  # by the last report of the driver

        def whole() -> str:
            text = scrape()
            rows = {status: values(text, "ray_gstep_rows_total", status=status, item="video") for status in counted}
            failures, ended = (values(text, f"ray_gstep_{name}_total") for name in ("failures", "runs_ended"))
            return text if (rows, failures, ended) == (counted, [2], [1]) else ""

        after = wait_until(whole, scrape, 60, meanwhile=pause)
    assert f"{len(kept)} of {len(ids) + 2} videos are in the cache already" in said
    assert re.search(rf"{n_left + 2}/{n_left + 2} videos, .*busy: decode \d+% encode \d+%.* \(bottleneck: ", said), said
    opened = TokenCache(cache)
    assert opened.video_ids == ids and all(len(opened.get(video_id).tokens) for video_id in ids)
    assert Counter(committed(opened.store)) == Counter([*ids, *bad])
    statuses = sorted(json.loads(file.read_text())["status"] for file in (cache / "runs").glob("*.json"))
    assert statuses == ["finished", "running"]
    assert not list((cache / "runs").glob("*.log"))  # nothing died

    assert values(after, "ray_gstep_failures_total", stage="decode", **{"class": "unsupported"}) == [2]
    (tokens_in,), (stored,) = (values(after, "ray_gstep_tokens_total", kind=kind) for kind in ("in", "kept"))
    assert 0 < stored < tokens_in
    assert all(values(after, "ray_gstep_bytes_total", kind=kind)[0] > 0 for kind in ("read", "stored"))
    for stage in ("decode", "encode", "prune", "write"):
        assert values(after, "ray_gstep_stage_seconds_total", stage=stage)[0] > 0
    shares = {stage: values(meanwhile, "ray_gstep_busy_share", stage=stage) for stage in both}
    assert all(len(share) == 1 and 0 <= share[0] <= 1 for share in shares.values()), shares
    assert values(meanwhile, "ray_gstep_queue", stage="decode") and values(meanwhile, "ray_gstep_items_left")
    assert values(meanwhile, "ray_gstep_last_row_time")[0] > started


def test_a_run_whose_head_is_lost_ends_with_the_cause_and_a_record(tmp_path):
    """Ray itself would end the driver after a minute, without a line."""
    ids = tiny_videos(tmp_path / "videos", 8)
    cache = tmp_path / "c"
    argv = argv_of(tmp_path, "StuckDecoder", "--videos-per-shard", "1")
    let_through(tmp_path / "videos", 3)
    driver = Driver(argv, tmp_path / "log", **environment())
    driver.until(lambda: files(cache, "videos"), "the first commit")
    processes = family(driver.pid)
    (head,) = [pid for pid, title in processes.items() if title.partition(" ")[0].endswith("/gcs_server")]
    os.kill(head, signal.SIGKILL)
    assert driver.wait() == 1, driver.output
    (last,) = [line for line in driver.output.splitlines() if " failed: " in line]
    stopped = r"the run stopped after (\d) of 8 videos: the head process of Ray on this machine .* has ended, "
    (n_done,) = re.search(stopped + ".* Rerun the same command to resume", last).groups()
    assert int(n_done) == len(TokenCache(cache).video_ids) < len(ids)
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert record["status"] == "failed" and "the head process of Ray" in record["error"]
    assert not list((cache / "runs").glob("*.running"))


def scrape(busy=()):
    """What the port of the node says; "" while it is not open, or a stage of ``busy`` has no share yet.

    What this process had counted in earlier clusters is left out.
    """
    (node,), session = ray.nodes(), f'SessionName="{ray._private.worker._global_node.session_name}"'
    text = ""
    with suppress(OSError):
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        lines = urllib.request.urlopen(address, timeout=10).read().decode().splitlines()
        text = "\n".join(line for line in lines if session in line)
    told = all(values(text, "ray_gstep_busy_share", stage=stage) for stage in busy)
    return text if told and (not busy or values(text, "ray_gstep_last_row_time")) else ""


def pause():
    time.sleep(1)  # a report comes every second


def values(text, name, **labels):
    """The values of a metric's series with these labels."""
    found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return [float(value) for pairs, value in found if all(pair in pairs for pair in wanted)]
