"""Drawn answers: their own seed alone decides, and they follow the distribution."""

import pytest
import torch

from gstep.language import Decoding
from gstep.language.decoding import SeededSampling
from tests.gstep.llms import GREEDY, ids_of, llm


@pytest.mark.parametrize("name", ["tiny-qwen3-vl", "tiny-qwen3-5"], scope="module")
def test_a_drawn_answer_depends_on_its_own_seed_alone(name, prompts):
    def decodings(*seeds):
        return [Decoding(max_new_tokens=8, temperature=0.9, top_p=0.95, top_k=50, seed=seed) for seed in seeds]

    together = llm(name).generate([*prompts, prompts[0], prompts[0]], [*decodings(0, 1, 2, 3, 4), GREEDY])
    alone = [llm(name).generate([p], [d])[0] for p, d in zip(prompts, decodings(0, 1, 2, 3), strict=True)]
    assert ids_of(together[:4]) == ids_of(alone)
    assert together[4].token_ids != together[0].token_ids
    assert together[5].token_ids == llm(name).generate([prompts[0]], [GREEDY])[0].token_ids


def drawn(scores, seeds=range(300), **options):
    """What some seeds draw of one row of scores."""
    rows = torch.tensor([scores])
    return {
        int(SeededSampling([Decoding(seed=seed, **options)])(torch.zeros(1, 1, dtype=torch.long), rows).argmax())
        for seed in seeds
    }


def test_the_temperature_divides_the_logits_from_greedy_to_any_heat():
    for temperature, share in ((0.5, 0.881), (1.0, 0.731), (4.0, 0.562)):
        draws = [drawn([0.0, 1.0], range(i, i + 1), temperature=temperature) for i in range(500)]
        assert draws.count({1}) / 500 == pytest.approx(share, abs=0.05)
    for temperature in (1e-300, 1e-38, 1e-7):
        for options in ({}, {"top_p": 0.5, "top_k": 2}):
            assert drawn([30.0, -5.0, 31.0, 29.0], range(20), temperature=temperature, **options) == {2}
    for temperature in (1e30, 1e300):  # what the model rules out stays so
        assert drawn([30.0, float("-inf"), -31.0], temperature=temperature) == {0, 2}


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.6, {1, 2}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_only_the_likeliest_that_make_up_top_p_are_drawn(top_p, kept):
    logits = torch.tensor([0.2, 0.4, 0.3, 0.1]).log().tolist()
    assert drawn(logits, temperature=1.0, top_p=top_p) == kept
