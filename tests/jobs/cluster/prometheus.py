"""Debian's Prometheus, which scrapes a Ray cluster of this machine, and is asked by HTTP."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.waiting import wait_until

BINARY = shutil.which("prometheus")


class Prometheus:
    """A Prometheus that scrapes the nodes which Ray lists in ``targets`` every two seconds."""

    def __init__(self, folder: Path, targets: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._at = f"127.0.0.1:{free.getsockname()[1]}"
        self._folder = folder
        scraped = {"job_name": "ray", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
        config = {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": [scraped]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Prometheus:
        options = (f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(BINARY), *options, f"--web.listen-address={self._at}"], stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(self._ready, (self._folder / "log").read_text, 60, meanwhile=lambda: time.sleep(0.1))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    def series(self, query: str, start: float, end: float) -> list[Any]:
        """Return the series of a query between two times."""
        asked = urllib.parse.urlencode({"query": query, "start": start, "end": end, "step": 1})
        answer = json.loads(self._get(f"/api/v1/query_range?{asked}"))
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._at}{path}", timeout=10) as answer:
            return answer.read()

    def _ready(self) -> bool:
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True
