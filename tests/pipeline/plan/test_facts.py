"""What a run took, and the limits at which it ends."""

import pytest

from pipeline.errors import LimitReached, RunFailed
from pipeline.plan.facts import Facts, Limits, video_seconds

GOOD = {
    "status": "ok", "decode_s": 2.0, "encode_s": 0.5, "prune_s": 0.25, "n_tokens": 100, "duration_s": 60.0,
}  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_facts_are_sums_over_rows():
    facts = Facts(token_bytes=140.0, encoders=2, gpus=2, hourly=36.0, clock=Clock())
    facts.add([GOOD, {**GOOD, "start_s": 10.0, "end_s": 70.0}, {"status": "failed", "decode_s": 1.0}])
    told = facts.as_record(wall_s=10.0)
    assert (told["decode_core_s"], told["output_bytes"], told["cost"]) == (5.0, 200 * 140, 0.1)
    assert told["encoder_busy"] == pytest.approx(1.0 / 20) and told["core_s_a_video"] == pytest.approx(5 / 3)
    assert told["video_hours"] == pytest.approx(110 / 3600)
    assert told["video_hours_per_day_per_gpu"] == pytest.approx(110 / 3600 / 10 * 86400 / 2)


def test_an_encoder_on_a_cpu_prunes_instead_of_encoding():
    facts = Facts(1.0, encoders=2, clock=Clock())
    facts.add([GOOD])
    assert facts.as_record(wall_s=10.0)["encoder_busy"] == pytest.approx(0.75 / 20)


def test_machines_that_join_count_from_then_on():
    clock = Clock()
    facts = Facts(1.0, clock=clock)
    clock.now += 10.0
    facts.take(2, 2, 72.0)  # nothing is done yet: so it was from the start
    clock.now += 90.0
    facts.add([{**GOOD, "encode_s": 400.0}])
    facts.take(6, 6, 216.0)
    clock.now += 50.0
    told = facts.as_record()
    assert told["cost"] == facts.cost == pytest.approx(2.0 + 3.0)
    assert told["encoder_busy"] == pytest.approx(400 / (2 * 100 + 6 * 50))
    assert told["video_hours_per_day_per_gpu"] == pytest.approx(60 / 3600 / (2 * 100 + 6 * 50) * 86400)


def test_no_gpu_and_no_price_give_none():
    told = Facts(1.0, clock=Clock()).as_record(wall_s=0.0)
    assert told["cost"] is told["video_hours_per_day_per_gpu"] is told["core_s_a_video"] is None
    assert told["encoder_busy"] == 0


def test_a_clip_has_the_seconds_between_its_ends():
    assert video_seconds({"duration_s": 60.0, "start_s": 50.0}) == 10
    assert video_seconds({"duration_s": 60.0, "end_s": 5.0}) == 5 and video_seconds({}) == 0


def test_limits_end_a_run_at_their_time_and_not_before():
    clock = Clock()
    facts = Facts(1.0, hourly=3600.0, clock=clock)
    limits = Limits(facts, max_hours=1 / 360, max_cost=5.0)
    clock.now += 4.9
    limits.check()
    clock.now += 0.2
    with pytest.raises(LimitReached, match="--max-cost 5 is reached"):
        limits.check()
    assert limits.reached and issubclass(LimitReached, RunFailed)
    Limits(facts).check()
