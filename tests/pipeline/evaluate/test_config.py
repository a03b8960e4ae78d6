"""The options of an evaluation: nonsense is refused by name, and the grid is all that every question is asked under."""

from dataclasses import fields

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.config import DEFAULT_METHODS, DEFAULT_RATIOS, FULL_LABEL, POSITIONS, EvaluateConfig
from pipeline.generate.config import GenerateConfig
from pipeline.generate.late_pruning import PruningSpec
from pipeline.prune.config import PruneConfig


def grid(*methods, ratios=(0.25,), **options):
    return EvaluateConfig(benchmark="x", method=[*methods], retention_ratio=[*ratios], **options).grid()


def test_full_retention_comes_first_then_methods_as_they_are_named_and_ratios_from_the_largest():
    assert list(grid("gstep")) == [FULL_LABEL, "gstep@0.25"] and grid("gstep")[FULL_LABEL] is None
    assert list(grid("none")) == [FULL_LABEL] == list(grid("none", ratios=(0.5, 0.1)))
    assert list(grid("uniform", "gstep", ratios=(0.1, 0.25))) == [
        FULL_LABEL, "uniform@0.25", "uniform@0.1", "gstep@0.25", "gstep@0.1"
    ]  # fmt: skip
    labels = list(EvaluateConfig(benchmark="x").grid())
    assert labels == [FULL_LABEL, *(f"{name}@{ratio:g}" for name in DEFAULT_METHODS for ratio in DEFAULT_RATIOS)]
    assert len(labels) == 17


def test_parameters_stand_behind_commas_and_are_part_of_the_label():
    asked = grid("fastv, K=3", "fastvid,c=4,a-b=0.5", "fastv,K=1")
    assert asked["fastv,K=3@0.25"] == PruningSpec("fastv", 0.25, {"K": "3"})
    assert asked["fastvid,a_b=0.5,c=4@0.25"].params == {"c": "4", "a_b": "0.5"}
    assert asked["fastv,K=1@0.25"] != asked["fastv,K=3@0.25"] and len(asked) == 4


def test_seeds_are_methods_of_their_own_and_a_range_of_them_is_short_for_each():
    assert list(grid("random,seed=0..2", "fps")) == [
        FULL_LABEL, "random,seed=0@0.25", "random,seed=1@0.25", "random,seed=2@0.25", "fps@0.25"
    ]  # fmt: skip
    assert grid("random,seed=1", "gstep", reference="random").keys() == {FULL_LABEL, "random,seed=1@0.25", "gstep@0.25"}


def test_a_method_may_name_positions_of_its_own_as_its_row_is_called():
    """Behind any parameters: rows are called by sorted names."""
    both = ("vcast,positions=original,tau=0.5", "gstep")
    named = [FULL_LABEL, "vcast,tau=0.5,positions=original@0.25"]
    assert list(grid(*both)) == [*named, "gstep@0.25"]
    assert list(grid(*both, positions="both")) == [
        *named, "gstep,positions=contiguous@0.25", "gstep,positions=original@0.25"
    ]  # fmt: skip
    assert grid(*both)[named[1]] == PruningSpec("vcast", 0.25, {"tau": "0.5"}, positions="original")
    with pytest.raises(UsageError, match="--method gstep,positions=close: positions must be contiguous or original"):
        grid("gstep,positions=close")


def test_positions_have_the_words_of_jobs_generate():
    choices = {one.name: set(one.metadata["choices"]) for one in fields(GenerateConfig) if one.name == "positions"}
    assert set(POSITIONS) - {"both"} == choices["positions"]


def test_the_runs_get_the_options_that_mean_the_same_there_and_no_other():
    """What it is asked with, how many, and where from is the evaluation's own."""
    given = EvaluateConfig(benchmark="x", workers=3, decode_workers=2, limit=5, seed=7, max_failed="1", min_gpus=1)
    prune, generate = given.select_shared_options(PruneConfig), given.select_shared_options(GenerateConfig)
    both = {"revision", "dtype", "device", "attn", "min_gpus", "max_gpus", "join", "retry_failed", "max_attempts"}
    both |= {"stall_timeout", "flush_seconds", "log_interval", "s3_endpoint", "s3_requester_pays"}
    engine = {"engine", "tensor_parallel", "engine_param", "batch_size"}
    assert prune.keys() == both | {"decode_timeout", "decode_workers", "encode_workers"}
    assert generate.keys() == both | engine | {"workers", "questions_per_shard", "close_thought"}
    assert (prune["decode_workers"], generate["workers"], prune["min_gpus"], generate["min_gpus"]) == (2, 3, 1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"benchmark": None}, r"give exactly one of --benchmark NAME .*, --score ANSWERS .* and --results RESULTS"),
        ({"benchmark": None, "score": ["a"], "method": ["gstep"]}, "go with --benchmark or --results"),
        ({"out": " "}, "--out must be a folder"),
        ({"retention_ratio": [0.25, 0.0]}, r"--retention-ratio must be in \(0, 1\], got 0.0"),
        ({"method": ["fastv,K"]}, "--method fastv,K: a parameter takes NAME=VALUE, got 'K'"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"within": 1.0}, "--within goes with --results"),
        ({"benchmark": None, "results": ["r"], "within": 0.0}, "--within must be a positive number of points"),
        ({"decode_timeout": 0.0}, "--decode-timeout must be a positive number of seconds"),
        ({"max_attempts": 0}, "--max-attempts must be at least 1"),  # of all runs
        ({"fps": 2.0, "num_frames": 8}, "--num-frames and --fps are two ways of sampling"),
        ({"max_frames": 8}, "--max-frames goes with --fps"),
        ({"reference": "fps"}, "--reference fps is no row of the table; there are gstep, none, random"),
        ({"method": ["random,seed=3..1"]}, "--method random,seed=3..1: the first seed is larger than the last"),
        ({"method": ["gstep", "random,seed=1..2"], "reference": "random,seed=1"}, "there are gstep, none, random$"),
        ({"positions": "close"}, "--positions must be one of .*contiguous"),
        ({"drop_tokens": True, "cache": "c"}, "--drop-tokens deletes the cache in --out"),
    ],
)
def test_nonsense_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        EvaluateConfig(**{"benchmark": "x", **options})


@pytest.mark.parametrize("given", [{"limit": 5}, {"drop_tokens": True}, {"fps": 2.0}, {"close_thought": True}])
@pytest.mark.parametrize("other", [{"score": ["a"]}, {"results": ["r"]}])
def test_what_only_a_benchmark_has_is_refused_where_nothing_is_asked(given, other):
    with pytest.raises(UsageError, match="goes with --benchmark"):
        EvaluateConfig(**other, **given)
