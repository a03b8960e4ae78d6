"""The stage that answers: how many models a cluster gets, and how questions are cut into blocks."""

import pytest

from pipeline.generate.config import GenerateConfig
from pipeline.generate.graph import plan_answers


@pytest.mark.parametrize("cpus", [1, 2, 64])
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("n_questions", [1, 40, 10**6])
@pytest.mark.parametrize("workers", [None, 3])
def test_all_models_fit_a_cluster_at_once(cpus, gpus, n_questions, workers):
    config = GenerateConfig(questions="q.jsonl", workers=workers)
    plan = plan_answers(cpus, gpus, n_questions, config)
    assert 1 <= plan.answer.workers <= max(gpus, 1 if workers is None else workers)
    assert plan.cpus <= cpus and plan.gpus <= gpus
    assert 1 <= plan.questions_per_block <= 64
    assert plan.answer.workers * plan.questions_per_block <= max(n_questions, 8 * plan.answer.workers)


@pytest.mark.parametrize(("batch_size", "per_shard", "block"), [(128, 64, 128), (48, 64, 48), (8, 20, 16), (1, 3, 3)])
def test_a_block_is_whole_batches(batch_size, per_shard, block):
    config = GenerateConfig(questions="q.jsonl", batch_size=batch_size, questions_per_shard=per_shard)
    assert plan_answers(8, 2, 10**4, config).questions_per_block == block


def test_every_gpu_gets_a_model():
    config = GenerateConfig(questions="q.jsonl")
    assert plan_answers(64, 8, 10**4, config).answer.workers == 8
    assert plan_answers(64, 0, 10**4, config).answer.workers == 1
