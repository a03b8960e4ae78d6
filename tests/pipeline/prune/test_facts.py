"""What a run took, and the hours at which it ends."""

import pytest

from pipeline.errors import LimitReached, RunFailed
from pipeline.prune.batches import pack_written
from pipeline.prune.facts import Facts, measure_seconds

GOOD = {
    "status": "ok", "decode_s": 2.0, "encode_s": 0.5, "prune_s": 0.25, "n_tokens": 100, "duration_s": 60.0,
}  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_facts_are_sums_over_rows():
    facts = Facts(token_bytes=140.0, on_gpus=True, clock=Clock())
    facts.set_encoders(2)
    facts.add(pack_written([GOOD, {**GOOD, "start_s": 10.0, "end_s": 70.0}, {"status": "failed", "decode_s": 1.0}]))
    taken = facts.as_record(wall_s=10.0)
    assert (taken["wall_s"], taken["decode_core_s"], taken["output_bytes"]) == (10.0, 5.0, 200 * 140)
    assert taken["encoder_busy"] == pytest.approx(1.0 / 20) and taken["video_hours"] == pytest.approx(110 / 3600)
    on_cpus = Facts(1.0, clock=Clock())  # where an encoder prunes instead of encoding
    on_cpus.add(pack_written([GOOD]))
    assert on_cpus.as_record(wall_s=10.0)["encoder_busy"] == pytest.approx(0.75 / 10)
    assert on_cpus.as_record(wall_s=0.0)["encoder_busy"] == 0


def test_machines_that_join_count_from_then_on():
    facts = Facts(1.0, on_gpus=True, clock=(clock := Clock()))
    clock.now += 10.0
    facts.set_encoders(2)  # nothing is done yet: so it was from the start
    clock.now += 90.0
    facts.add(pack_written([{**GOOD, "encode_s": 400.0}]))
    facts.set_encoders(6)
    clock.now += 50.0
    assert facts.as_record()["encoder_busy"] == pytest.approx(400 / (2 * 100 + 6 * 50))


def test_a_clip_has_the_seconds_between_its_ends():
    assert measure_seconds({"duration_s": 60.0, "start_s": 50.0}) == 10
    assert measure_seconds({"duration_s": 60.0, "end_s": 5.0}) == 5 and measure_seconds({}) == 0


def test_the_limit_ends_a_run_at_its_time_and_not_before():
    facts = Facts(1.0, max_hours=1 / 360, clock=(clock := Clock()))
    clock.now += 9.9
    facts.check_limit()
    clock.now += 0.2
    with pytest.raises(LimitReached, match=r"--max-hours .* is reached"):
        facts.check_limit()
    assert facts.limit_reached and issubclass(LimitReached, RunFailed)
