"""Options that several commands share: checked by name, recorded without their secrets."""

import pytest

from pipeline.prune.config import PruneConfig


@pytest.mark.parametrize(("text", "limit"), [(None, 9), ("3", 3), ("0", 0), ("0.25", 2), ("50%", 5), ("1.0", 10)])
def test_failure_limit(text, limit):
    assert PruneConfig(max_failed=text).failure_limit(10) == limit


@pytest.mark.parametrize(
    ("text", "total", "limit"), [(None, 20, 10), (None, 200, 10), (None, 400, 20), ("3", 400, 3), ("50%", 400, 200)]
)
def test_the_limit_of_failures_from_outside(text, total, limit):
    assert PruneConfig(max_failed=text).outside_limit(total) == limit


def test_a_record_tells_no_secret():
    record = PruneConfig(s3_endpoint="http://store.example:9000").as_record()
    assert record["s3_endpoint"] == "(set)"
    assert PruneConfig().as_record()["s3_endpoint"] is None
