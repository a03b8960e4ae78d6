"""The benchmark of reading: run on a real cache of a few small videos; nothing here asserts a time."""

from __future__ import annotations

import json

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.read.times import TimedReader, shares


def test_all_ways_are_measured_on_a_real_cache(tmp_path, capsys):
    file = tmp_path / "read.json"
    sizes = ["--videos", "5", "--tokens", "40", "--hidden", "8", "--videos-per-shard", "3", "--repeats", "2"]
    assert benchmark.main(["read", *sizes, "--s3", "--folder", str(tmp_path), "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    ways = {way["name"]: way for way in record["ways"]}
    assert len(ways) == 4 + 7 + 1 + 7 and all(len(way["seconds"]) == 2 for way in ways.values())
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" not in name} == {5 * 40 * 16}
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" in name} == {5 * 16 * 16}
    assert all(way["beside"] in {"", *ways} for way in ways.values())
    assert ways["S3: boto3, a GET a video"]["requests"] == 5 and ways["get, in order of index"]["requests"] is None
    assert ways["S3: get, in order of index"]["requests"] == 0  # so small that all came with the footer
    assert "get_many" in capsys.readouterr().out and list(tmp_path.iterdir()) == [file]


def test_shares_are_of_the_same_round_and_of_bytes():
    plain = TimedReader("plain", print, "", 100, [1.0, 2.0, 9.0], [1.0, 1.0, 1.0])
    half = TimedReader("half", print, "plain", 50, [1.0, 2.0, 9.0], [0.25, 0.25, 0.25])
    assert shares(half, plain) == ("50%", "200%") and shares(plain, None) == ("", "")
