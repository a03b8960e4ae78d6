"""Training, development and test never share a video, and nobody gets a test video without asking for it."""

from itertools import combinations

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.shapes.making import make_video
from pipeline.evaluate.shapes.world import BLOCK, SEEDS, TEST, benchmark_seeds, check_seed


@pytest.mark.parametrize(("one", "other"), list(combinations(SEEDS, 2)))
def test_no_two_splits_share_a_seed(one, other):
    assert not set(SEEDS[one]) & set(SEEDS[other])


def test_a_test_video_is_made_for_whoever_names_its_split_alone():
    assert make_video(TEST[0], split="test").seed == TEST[0]
    for split in ("train", "development"):
        with pytest.raises(ValueError, match=f"seed {TEST[0]} is of the test videos; those of split='{split}' are"):
            make_video(TEST[0], split=split)
    with pytest.raises(TypeError, match="split"):
        make_video(SEEDS["train"][0])


def test_seeds_of_no_split_are_refused():
    for seed in (-1, 0, SEEDS["train"].stop, TEST.stop):
        with pytest.raises(ValueError, match=f"seed {seed} is of no split"):
            check_seed(seed, "train")


def test_benchmarks_of_two_seeds_share_no_video():
    for split in SEEDS:
        assert not set(benchmark_seeds(split, 0, BLOCK)) & set(benchmark_seeds(split, 1, BLOCK))
        assert benchmark_seeds(split, 1, 3)[-1] in SEEDS[split]
    last = len(TEST) // BLOCK - 1
    assert benchmark_seeds("test", last, BLOCK)[-1] == TEST[-1]
    with pytest.raises(UsageError, match=f"--seed must be 0 to {last} on the split test, got {last + 1}"):
        benchmark_seeds("test", last + 1, 1)
    for count in (0, BLOCK + 1):
        with pytest.raises(UsageError, match=f"--videos must be 1 to {BLOCK}, got {count}; take another --seed"):
            benchmark_seeds("train", 0, count)
