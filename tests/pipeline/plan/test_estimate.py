"""The forecast in closed form: which stage is the slowest, and what follows in time and money."""

import pytest

from pipeline.plan.estimate import (
    Cluster,
    Interval,
    Prices,
    Workload,
    estimate_decode_seconds,
    estimate_mean,
    estimate_run,
    find_gpu_type,
)
from pipeline.plan.render import list_rows

A100S = Cluster(4, "A100", 48.0)
PRICED = Prices(gpu_hour=2.0)


def work(**changes) -> Workload:
    """1,000 videos of 10 core-seconds, 0.25 GPU-seconds and 10 MB of tokens."""
    each = {"decode_s": 10.0, "encode_s": 0.25, "frame_bytes": 14e6, "output_bytes": 1e7}
    exactly = {name: Interval.from_value(value) for name, value in each.items()}
    return Workload(**{"videos": 1000, **exactly, **changes})


def test_the_slowest_stage_sets_the_pace():
    slow_decode = estimate_run(work(), A100S, PRICED)
    assert slow_decode.bottleneck == "decode" and "more decode cores" in slow_decode.remedy
    # 1,000 videos of 10 core-seconds on 48 cores; what else happens there adds a little.
    assert 1000 * 10 / 48 < slow_decode.wall_s.expected < 1.2 * 1000 * 10 / 48
    quick = work(decode_s=Interval.from_value(0.1))
    slow_encode = estimate_run(quick, A100S, PRICED)
    assert slow_encode.bottleneck == "encode" and "more GPUs" in slow_encode.remedy
    assert slow_encode.gpu_s.expected == 250
    many = estimate_run(quick, Cluster(512, "A100", 6144.0), PRICED)
    assert many.bottleneck == "driver" and "--shard I/" in many.remedy

    more = int(slow_decode.remedy.split()[0].replace(",", ""))
    assert estimate_run(work(), A100S._replace(cores=A100S.cores + 1.05 * more), PRICED).bottleneck != "decode"
    assert estimate_run(work(), A100S._replace(cores=A100S.cores + 0.9 * more), PRICED).bottleneck == "decode"


def test_money_is_the_cluster_by_the_hour_and_the_bytes_by_the_month_and_a_cost_without_gpus_says_so():
    plan = estimate_run(work(), A100S, Prices(gpu_hour=2.0, core_hour=0.5, gb_month=0.023))
    assert plan.cost["total"].expected == pytest.approx(plan.wall_s.expected / 3600 * (4 * 2 + 48 * 0.5))
    assert plan.cost["per_1000_videos"] == plan.cost["total"]
    assert plan.cost["storage_a_month"].expected == pytest.approx(1000 * 0.01 * 0.023)
    for cluster, prices in ((A100S, Prices()), (Cluster(0, None, 8.0), PRICED)):
        unknown = estimate_run(work(), cluster, prices)
        assert unknown.cost is None and any("gpu-hour=X" in note for note in unknown.notes)
    missing = "the cost includes only the CPUs: give --price gpu-hour=X, too"
    assert missing in estimate_run(work(), A100S, Prices(core_hour=0.5)).notes
    for cluster, prices in ((A100S, PRICED), (Cluster(0, None, 8.0), Prices(core_hour=0.5)), (A100S, Prices())):
        assert missing not in estimate_run(work(), cluster, prices).notes


def test_cpus_decode_and_encode_by_turns():
    plan = estimate_run(work(), Cluster(0, None, 8.0), Prices())
    assert plan.bottleneck == "cpus" and plan.gpu_s == Interval.from_value(0.0)
    assert plan.wall_s.expected > (plan.decode_core_s.expected + plan.encode_core_s.expected) / 8


def test_unreadable_videos_cost_their_decoding_alone_and_nothing_to_do_takes_nothing():
    whole, half = estimate_run(work(), A100S, PRICED), estimate_run(work(failed=0.5), A100S, PRICED)
    assert half.output_bytes.expected == whole.output_bytes.expected / 2 and half.gpu_s.low == whole.gpu_s.low / 2
    assert half.decode_core_s == whole.decode_core_s
    assert "1,000, of which 50 % fail as in the sample" in dict(list_rows(half))["videos"]
    nothing = estimate_run(Workload(videos=0), A100S, PRICED)
    assert (nothing.wall_s, nothing.bottleneck) == (Interval.from_value(0.0), "nothing")
    assert "nothing is left to do" in dict(list_rows(nothing))["bottleneck"]


def test_a_mean_is_surer_of_more_values_and_sure_of_all():
    few, many = estimate_mean([1, 3], 10**6), estimate_mean([1, 3] * 20, 10**6)
    assert few.expected == many.expected == 2
    assert few.high - few.low > 3 * (many.high - many.low) > 0
    assert estimate_mean([1, 3], population=2) == Interval(2, 2, 2)
    assert estimate_mean([2, 2, 2], 10**6) == Interval(2, 2, 2)
    assert estimate_mean([2], 10) == Interval(1, 2, 4) and estimate_mean([2], population=1) == Interval(2, 2, 2)


@pytest.mark.parametrize(
    ("seconds", "width", "height", "core_s"),
    [  # measured on two cores, 32 frames at 24 a second; here at 30, so that seconds x 0.8 have as many pictures
        (10, 1280, 720, 0.42),
        (60, 1920, 1080, 4.87), (60, 1920, 1080, 5.42),
        (600, 1280, 720, 5.52),
    ],
)  # fmt: skip
def test_decoding_is_in_the_range_of_what_was_measured(seconds, width, height, core_s):
    forecast = estimate_decode_seconds(0.8 * seconds, width, height, 32)
    assert forecast.low <= core_s <= forecast.high
    few, many = estimate_decode_seconds(0.1, 640, 360, 32), estimate_decode_seconds(10, 640, 360, 32)
    assert few.expected < many.expected < 0.3  # a video with fewer pictures than frames costs its frames


def test_devices_are_found_by_the_names_that_libraries_give_them():
    names = {
        "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100-40GB", "NVIDIA_H100": "H100",
        "NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA A10G": "A10G", "NVIDIA GeForce RTX 4090": None,
    }  # fmt: skip
    assert {name: find_gpu_type(name) for name in names} == names
