"""What stages are made of: finite retries, and words for what they do."""

from pipeline.execution.stages import RESTARTS, TASK_RETRIES


def test_restarts_are_finite():
    assert 0 < RESTARTS < TASK_RETRIES < 100
