"""The benchmark of reading tokens; nothing here asserts a time."""

import json

from jobs.benchmark import __main__ as benchmark
from jobs.benchmark.read import make_row


def test_all_ways_of_reading_are_measured_on_a_real_cache(tmp_path, capsys):
    sizes = ["--videos", "5", "--tokens", "40", "--hidden", "8", "--videos-per-shard", "3", "--repeats", "2"]
    assert benchmark.main(["read", *sizes, "--s3", "--folder", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    ways = {way["name"]: way for way in json.loads(shown.out)["ways"]}
    assert len(ways) == 4 + 7 + 1 + 7 and all(len(way["seconds"]) == 2 for way in ways.values())
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" not in name} == {5 * 40 * 16}
    assert {way["n_bytes"] for name, way in ways.items() if "10 %" in name} == {5 * 16 * 16}
    assert all(way["beside"] in {"", *ways} for way in ways.values())
    assert ways["S3: boto3, a GET a video"]["requests"] == 5 and ways["get, in order of index"]["requests"] is None
    assert ways["S3: get, in order of index"]["requests"] == 0  # so small that all came with the footer
    assert "get_many" in shown.err and not list(tmp_path.iterdir())


def test_shares_are_of_the_same_round_and_of_bytes():
    plain = {"name": "plain", "n_bytes": 100, "seconds": [1.0, 2.0, 9.0], "cpu_seconds": [1.0] * 3, "requests": None}
    half = {**plain, "name": "half", "n_bytes": 50, "cpu_seconds": [0.25] * 3, "requests": 7}
    assert make_row(half, plain) == ("half", "0.00", "50%", "0.00", "200%", "7")
    assert make_row(plain, None) == ("plain", "0.00", "", "0.00", "", "")
