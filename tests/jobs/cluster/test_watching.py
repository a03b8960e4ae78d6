"""What an operator sees of a run: metrics, the queries of the dashboard, alerts, and the last words of workers."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.jobs.cluster.prometheus import BINARY, Prometheus
from tests.jobs.faults import tiny_videos
from tests.jobs.jobs import clips, environment, run
from tests.jobs.ray_cluster import Cluster
from tests.paths import ROOT
from tests.waiting import wait_until

CLUSTER = ROOT / "jobs" / "cluster"
needs_prometheus = pytest.mark.skipif(BINARY is None, reason="no prometheus here: apt-get install prometheus")


def panels() -> list[dict]:
    return json.loads((CLUSTER / "dashboard.json").read_text())["panels"]


class Scraped:
    """A run of 40 videos, of which two fail, and what was read of it meanwhile and after.

    Attributes:
        text: what all ports said last while it ran, and after.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        # Looks come a tenth of the stall timeout apart, and Ray's processes report as often as that.
        cluster = stack.enter_context(Cluster(cpus=2, RAY_metrics_report_interval_ms="1000"))
        targets = cluster.folder / "prom_metrics_service_discovery.json"
        wait_until(targets.exists, "Ray lists what to scrape", 60)
        self._targets = targets
        self.prometheus = stack.enter_context(Prometheus(folder, targets)) if BINARY else None
        videos = folder / "videos"
        self.ids = tiny_videos(videos, 38)
        for name in ("no-video.mp4", "text.mp4"):
            (videos / name).write_text("no video")
        self.meanwhile, self.started = "", time.time()
        ended = threading.Event()
        reader = threading.Thread(target=self._read_until, args=(ended,))
        reader.start()
        try:
            flags = ("--num-frames", "2", "--decoder", "tests.jobs.hostile:SlowDecoder")
            argv = (str(videos), "--out", str(folder / "c"), *flags, "--log-interval", "2", "--flush-seconds", "2")
            self.done = run("jobs.prune", *argv, RAY_ADDRESS=cluster.gcs_address, RAY_metrics_report_interval_ms="1000")
            time.sleep(3)  # what the driver reported last is scraped
        finally:
            ended.set()
            reader.join()
        self.ended = time.time()
        self.after = self.read()

    def read(self) -> str:
        """Read the metrics of every port that Ray lists, over HTTP."""
        ports = [port for entry in json.loads(self._targets.read_text()) for port in entry["targets"]]
        texts = [urllib.request.urlopen(f"http://{port}/metrics", timeout=10).read().decode() for port in ports]
        return "".join(texts)

    def _read_until(self, ended: threading.Event) -> None:
        while not ended.wait(0.5):
            try:
                text = self.read()
            except OSError:  # a port that Ray lists need not listen yet
                continue
            # A port names a metric for a while before and after it has values.
            if all(values(text, "ray_gstep_busy_share", stage=stage) for stage in ("decode", "encode")):
                self.meanwhile = text


def values(text: str, name: str, **labels: str) -> list[float]:
    """Return the values of a metric's series with these labels."""
    found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return [float(value) for pairs, value in found if all(pair in pairs for pair in wanted)]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    with ExitStack() as stack:
        yield Scraped(tmp_path_factory.mktemp("scraped"), stack)


@pytest.mark.slow
def test_the_metrics_port_has_the_counts_of_the_run(scraped):
    assert scraped.done.returncode == 0, scraped.done.stdout
    after = scraped.after
    assert values(after, "ray_gstep_rows_total", status="ok", item="video") == [38]
    assert values(after, "ray_gstep_rows_total", status="failed") == [2]
    assert values(after, "ray_gstep_failures_total", stage="decode", **{"class": "unsupported"}) == [2]
    (tokens_in,), (kept,) = (values(after, "ray_gstep_tokens_total", kind=kind) for kind in ("in", "kept"))
    assert 0 < kept < tokens_in
    assert all(values(after, "ray_gstep_bytes_total", kind=kind)[0] > 0 for kind in ("read", "stored"))
    for stage in ("decode", "encode", "prune", "write"):
        assert values(after, "ray_gstep_stage_seconds_total", stage=stage)[0] > 0


@pytest.mark.slow
def test_while_it_runs_the_port_has_queues_and_busy_shares(scraped):
    text = scraped.meanwhile
    shares = {stage: values(text, "ray_gstep_busy_share", stage=stage) for stage in ("decode", "encode")}
    assert all(len(share) == 1 and 0 <= share[0] <= 1 for share in shares.values()), shares
    assert values(text, "ray_gstep_queue", stage="decode") and values(text, "ray_gstep_items_left")
    assert values(text, "ray_gstep_last_row_time")[0] > scraped.started


@pytest.mark.slow
def test_the_log_names_rate_time_left_busy_shares_and_the_bottleneck(scraped):
    """Decoding takes 0.3 s a video here, and nothing else so long, unless other work keeps the cores.

    Shares are measured every ten seconds and at the end, so only the last line surely has any.
    """
    shares = r"busy: decode \d+% encode \d+%.* \(bottleneck: (decode|encode|write)\)"
    assert re.search(rf"40/40 videos, .*{shares}", scraped.done.stdout), scraped.done.stdout
    assert re.search(r"\d+/40 videos, .*, \d+\.\d\d videos/s, \d+ s left", scraped.done.stdout)


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_gets_a_series_of_the_run(scraped, panel):
    (target,) = panel["targets"]
    series = scraped.prometheus.series(target["expr"], scraped.started, scraped.ended)
    assert series and all(one["values"] for one in series), target["expr"]
    (record,) = (Path(scraped.prometheus._folder) / "c" / "runs").glob("*.json")
    assert {one["metric"]["run"] for one in series} == {record.stem}


@pytest.mark.skipif(find_spec("grafana_foundation_sdk") is None, reason="no grafana-foundation-sdk here")
def test_the_dashboard_is_what_the_script_makes():
    made = subprocess.run([sys.executable, CLUSTER / "dashboard.py"], capture_output=True, text=True, check=True)
    assert made.stdout == (CLUSTER / "dashboard.json").read_text()


@needs_prometheus
def test_the_alerts_fire_when_they_should_and_not_else(tmp_path):
    promtool = shutil.which("promtool")
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(CLUSTER / name, tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    for check in (("test", "rules", "alerts_test.yml"), ("check", "config", "prometheus.yml")):
        done = subprocess.run([promtool, *check], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_what_a_dying_worker_said_is_in_a_file_that_the_summary_names(tmp_path):
    """Its process ends itself where the GPU would be of no use to it any more, and says why before that."""
    ids = tiny_videos(tmp_path / "videos", 10)  # the fourth has five frames, the fifth six
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--pruner", "tests.jobs.poison:Poison"]
    done = run("jobs.prune", *argv, "--fps", "25", "--encode-workers", "1")
    assert done.returncode == 0, done.stdout
    (log,) = (tmp_path / "c" / "runs").glob("*.log")
    assert f"what workers said before they died is in {log}" in " ".join(done.stdout.split())
    text = log.read_text()
    assert text.count(" a worker of encode on ") >= 3  # two videos, each tried twice; the last death may come late
    assert f"    {ids[4]}: CUDA error: an illegal memory access was encountered" in text
    (record,) = (tmp_path / "c" / "runs").glob("*.json")
    assert json.loads(record.read_text())["summary"]["log"] == str(log)


@pytest.mark.slow
def test_the_document_of_a_run_whose_encoder_died_is_alone_on_stdout(tmp_path):
    """Ray prints on stdout that it tries the task again, at any time."""
    tiny_videos(tmp_path / "videos", 10)
    argv = [
        "jobs.prune",
        str(tmp_path / "videos"),
        "--out",
        str(tmp_path / "c"),
        "--fps",
        "25",
        "--encode-workers",
        "1",
    ]
    command = [sys.executable, "-m", *argv, "--pruner", "tests.jobs.poison:Poison", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["failures"] == {"crash": 2}, done.stderr
    assert "(raylet)" in done.stderr


@pytest.mark.slow
def test_where_nothing_died_no_file_is_named(tmp_path):
    done = run("jobs.prune", str(clips()[1]), "--out", str(tmp_path / "c"), "--num-frames", "2")
    assert done.returncode == 0 and "before they died" not in done.stdout
    assert [file.suffix for file in (tmp_path / "c" / "runs").iterdir()] == [".json"]
