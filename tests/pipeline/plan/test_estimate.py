"""The forecast in closed form: which stage is the slowest, and what follows in time and money."""

import json
import math

import pytest

from pipeline.plan.estimate import Cluster, Prices, estimate
from pipeline.plan.intervals import Interval
from pipeline.plan.render import rows_of
from tests.pipeline.plan.workloads import A100S, PRICED, work

FORECAST = {"wall_s", "decode_core_s", "gpu_s", "output_bytes", "break_even_questions"}


def test_the_slowest_stage_sets_the_pace():
    slow_decode = estimate(work(), A100S, PRICED)
    assert slow_decode.bottleneck == "decode" and "more decode cores" in slow_decode.remedy
    # 1,000 videos of 10 core-seconds on 48 cores; what else happens there adds a little.
    assert 1000 * 10 / 48 < slow_decode.wall_s.expected < 1.2 * 1000 * 10 / 48
    slow_encode = estimate(work(decode_s=Interval.exactly(0.1)), A100S, PRICED)
    assert slow_encode.bottleneck == "encode" and "more GPUs" in slow_encode.remedy
    assert slow_encode.gpu_s.expected == pytest.approx(1000 * 0.1 / 0.4, rel=0.1)  # 40 % of the peak
    many = estimate(work(decode_s=Interval.exactly(0.1)), Cluster(512, "A100", 6144.0), PRICED)
    assert many.bottleneck == "driver" and "--shard I/" in many.remedy


def test_twice_the_cores_that_are_missing_move_the_bottleneck():
    plan = estimate(work(), A100S, PRICED)
    more = int(plan.remedy.split()[0].replace(",", ""))
    assert estimate(work(), A100S._replace(cores=A100S.cores + 1.05 * more), PRICED).bottleneck != "decode"
    assert estimate(work(), A100S._replace(cores=A100S.cores + 0.9 * more), PRICED).bottleneck == "decode"


def test_cores_a_gpu_are_those_at_which_both_stages_take_as_long():
    plan = estimate(work(), A100S, PRICED)
    cores = 4 * plan.cores_a_gpu.expected
    stages = estimate(work(), A100S._replace(cores=cores), PRICED).stage_s
    assert stages["decode"].expected == pytest.approx(stages["encode"].expected)


def test_the_cache_pays_from_the_question_at_which_storing_is_cheaper_than_encoding_again():
    prices = Prices(gpu_hour=3.6, gb_month=0.02, months=2)
    plan = estimate(work(), A100S, prices)
    running = max(part.expected for part in plan.stage_s.values()) * 1.03
    encode = running / 1000 * 4 * 3.6 / 3600
    store, read = 0.01 * 0.02 * 2, 1e7 / 5e8 * 3.6 / 3600
    questions = plan.break_even_questions.expected
    assert encode + store + questions * read == pytest.approx(questions * encode)
    assert plan.break_even_questions.low <= questions <= plan.break_even_questions.high
    longer = estimate(work(), A100S, prices._replace(months=24)).break_even_questions
    assert longer.expected > questions
    # Where encoding takes less than reading, the cache never pays.
    quick = work(decode_s=Interval.exactly(0.0), flops=Interval.exactly(0.0), output_bytes=Interval.exactly(1e12))
    assert estimate(quick, A100S, prices).break_even_questions.expected == math.inf


def test_money_is_the_cluster_by_the_hour():
    plan = estimate(work(), A100S, Prices(gpu_hour=2.0, core_hour=0.5))
    assert plan.cost["total"].expected == pytest.approx(plan.wall_s.expected / 3600 * (4 * 2 + 48 * 0.5))
    assert plan.cost["per_1000_videos"] == plan.cost["total"]
    assert plan.cost["per_video_hour"].expected == pytest.approx(plan.cost["total"].expected * 60 / 1000)
    assert plan.cost["storage_a_month"].expected == pytest.approx(1000 * 0.01 * 0.023)


def test_without_a_price_no_money_is_told_and_it_says_so():
    plan = estimate(work(), A100S, Prices())
    assert plan.cost is None and any("--gpu-hour" in note for note in plan.notes)
    assert any("0.8 to 3.0 dollars" in note for note in plan.notes)
    cpus = estimate(work(), Cluster(0, None, 8.0), Prices(gpu_hour=2.0))
    assert cpus.cost is None and any("time alone" in note for note in cpus.notes)
    assert cpus.break_even_questions.expected >= 1


def test_cpus_decode_and_encode_by_turns():
    plan = estimate(work(), Cluster(0, None, 8.0), Prices())
    assert plan.bottleneck == "cpus" and plan.gpu_s == Interval.exactly(0.0) and plan.peak_gpu_bytes is None
    assert plan.wall_s.expected > (plan.decode_core_s.expected + plan.encode_core_s.expected) / 8


def test_unreadable_videos_cost_their_decoding_alone():
    whole, half = estimate(work(), A100S, PRICED), estimate(work(failed=Interval.exactly(0.5)), A100S, PRICED)
    assert half.output_bytes.expected == whole.output_bytes.expected / 2 and half.gpu_s.low == whole.gpu_s.low / 2
    assert half.decode_core_s == whole.decode_core_s
    assert "50 % of them unreadable" in dict(rows_of(half))["videos"]
    none = estimate(work(failed=Interval.exactly(1.0)), A100S, PRICED)
    assert none.output_bytes.high == 0 and none.break_even_questions is None


def test_nothing_to_do_takes_nothing():
    plan = estimate(work(videos=0), A100S, PRICED)
    assert (plan.wall_s, plan.bottleneck, plan.break_even_questions) == (Interval.exactly(0.0), "nothing", None)
    assert list(rows_of(plan))


def test_what_an_earlier_run_measured_counts_instead_of_operations():
    plan = estimate(work(encode_s=Interval.exactly(2.0)), A100S, PRICED)
    assert plan.gpu_s == Interval.exactly(2000.0)


def test_the_record_is_json_with_ranges_in_order():
    record = json.loads(json.dumps(estimate(work(decode_s=Interval(5, 10, 20)), A100S, PRICED).as_record()))
    assert record["videos"] == 1000 and record["cluster"] == A100S._asdict()
    for key in FORECAST:
        assert record[key]["low"] <= record[key]["expected"] <= record[key]["high"], key
    assert record["bottleneck"] in record["stage_s"]
