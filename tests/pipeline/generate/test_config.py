"""The options of a run that answers questions: checked by name when they are given."""

import pytest

from pipeline.errors import UsageError
from pipeline.generate.config import GenerateConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"questions": None}, "--questions FILE is missing"),
        ({"out": " "}, "--out must be a folder"),
        ({"retention_ratio": 0.0}, "--retention-ratio must be in"),
        ({"retention_ratio": 1.5}, "--retention-ratio must be in"),
        ({"retention_ratio": float("nan")}, "--retention-ratio must be in"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"questions_per_shard": 0}, "--questions-per-shard must be at least 1"),
        ({"workers": 0}, "--workers must be at least 1"),
        ({"limit": 0}, "--limit must be at least 1"),
        ({"order": "random"}, "--order must be one of"),
        ({"rule": "vllm-9"}, "--rule must be one of"),
        ({"frame_times": "guessed"}, "--frame-times must be one of"),
        ({"choices": "guess"}, "--choices must be one of"),
        ({"format": "csv"}, "--format must be one of"),
        ({"max_attempts": 0}, "--max-attempts must be at least 1"),  # of all runs
        ({"pruner_param": ["K"]}, "NAME=VALUE"),
    ],
)
def test_nonsense_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        GenerateConfig(**{"questions": "q.jsonl", **options})


def test_what_is_not_said_is_left_to_the_cache_and_the_model():
    config = GenerateConfig(questions="q.jsonl")
    assert (config.retention_ratio, config.model, config.pruner) == (None, None, None)
    assert (config.positions, config.order, config.temperature) == ("auto", "auto", 0.0)
    assert GenerateConfig(questions="q.jsonl", retention_ratio=1.0, workers=1, limit=1).limit == 1
