"""Which limit of resuming is met first."""

from dataclasses import replace

from jobs.benchmark.resume.times import ResumeTimes


def test_the_first_limit_is_the_one_that_is_met_first():
    seconds = {"listing": 1.0, "manifest": 1.0, "cache": 36.0, "remaining": 1.0}
    found = ResumeTimes(1000, "csv", 100, 1, seconds, seconds, 100.0, 64.0, 200.0, memory=200 * 10**6)
    assert found.first_limit() == (100_000, "an hour for: read the videos shards")
    assert replace(found, memory=200 * 10**4).first_limit() == (10_000, "this machine's memory")
