"""What a run took, and the hours at which it ends."""

import random
from unittest.mock import Mock

import pytest

from pipeline.errors import LimitReached, RunFailed
from pipeline.prune.batches import pack_written
from pipeline.prune.facts import Facts, measure_seconds, sum_column

GOOD = {
    "status": "ok", "decode_s": 2.0, "encode_s": 0.5, "prune_s": 0.25, "n_tokens": 100, "duration_s": 60.0,
}  # fmt: skip


def test_facts_are_sums_over_rows():
    facts = Facts(token_bytes=140.0, on_gpus=True, clock=Mock(return_value=100.0))
    facts.set_encoders(2)
    facts.add(pack_written([GOOD, {**GOOD, "start_s": 10.0, "end_s": 70.0}, {"status": "failed", "decode_s": 1.0}]))
    taken = facts.as_record(wall_s=10.0)
    assert (taken["wall_s"], taken["decode_core_s"], taken["output_bytes"]) == (10.0, 5.0, 200 * 140)
    assert taken["encoder_busy"] == pytest.approx(1.0 / 20) and taken["video_hours"] == pytest.approx(110 / 3600)
    on_cpus = Facts(1.0, clock=Mock(return_value=100.0))  # where an encoder prunes instead of encoding
    on_cpus.add(pack_written([GOOD]))
    assert on_cpus.as_record(wall_s=10.0)["encoder_busy"] == pytest.approx(0.75 / 10)
    assert on_cpus.as_record(wall_s=0.0)["encoder_busy"] == 0


@pytest.mark.parametrize("on_gpus", [True, False])
def test_seconds_are_added_row_by_row_so_that_shards_do_not_change_a_runs_record(on_gpus):
    """A float sum depends on its order: adding the sums of columns or of shards gives other last digits."""
    draw = random.Random(0)
    rows = [{name: draw.random() for name in ("decode_s", "encode_s", "prune_s", "duration_s")} for _ in range(300)]
    rows = [{**row, "status": draw.choice(["ok", "ok", "failed"]), "start_s": 0.1} for row in rows]
    for row in rows[::7]:
        del row["encode_s"], row["duration_s"]
    decode_s = encode_s = video_s = 0.0
    for row in rows:
        decode_s += row["decode_s"]
        encode_s += row.get("encode_s", 0.0)
        encode_s += 0.0 if on_gpus else row["prune_s"]
        video_s += max(0.0, row.get("duration_s", 0.0) - 0.1) if row["status"] == "ok" else 0.0
    for size in (1, 7, 300):
        facts = Facts(1.0, on_gpus=on_gpus, clock=Mock(return_value=100.0))
        for start in range(0, len(rows), size):
            facts.add(pack_written(rows[start : start + size]))
        record = facts.as_record(wall_s=1.0)
        assert (record["decode_core_s"], record["encode_s"]) == (decode_s, encode_s)
        assert record["video_hours"] == video_s / 3600


def test_a_sum_of_bytes_is_exact_beyond_64_bits():
    rows = pack_written([{"source_size": 2**62}, {"source_size": 2**62 + 1}, {}, {"source_size": 2**62}])
    assert sum_column(rows, "source_size") == 3 * 2**62 + 1
    assert sum_column(rows.slice(2, 1), "source_size") == 0 == sum_column(rows.slice(4), "decode_s")


def test_machines_that_join_count_from_then_on():
    facts = Facts(1.0, on_gpus=True, clock=(clock := Mock(return_value=100.0)))
    clock.return_value += 10.0
    facts.set_encoders(2)  # nothing is done yet: so it was from the start
    clock.return_value += 90.0
    facts.add(pack_written([{**GOOD, "encode_s": 400.0}]))
    facts.set_encoders(6)
    clock.return_value += 50.0
    assert facts.as_record()["encoder_busy"] == pytest.approx(400 / (2 * 100 + 6 * 50))


def test_a_clip_has_the_seconds_between_its_ends():
    assert measure_seconds({"duration_s": 60.0, "start_s": 50.0}) == 10
    assert measure_seconds({"duration_s": 60.0, "end_s": 5.0}) == 5 and measure_seconds({}) == 0


def test_the_limit_ends_a_run_at_its_time_and_not_before():
    facts = Facts(1.0, max_hours=1 / 360, clock=(clock := Mock(return_value=100.0)))
    clock.return_value += 9.9
    facts.check_limit()
    clock.return_value += 0.2
    with pytest.raises(LimitReached, match=r"--max-hours .* is reached"):
        facts.check_limit()
    assert facts.limit_reached and issubclass(LimitReached, RunFailed)
