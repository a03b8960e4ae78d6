"""CDPruner where golden cases do not reach: determinants, relevance, what is refused."""

import pytest
import torch

import gstep
from gstep.pruners.cdpruner import compute_relevance
from tests.gstep.synthetic import prune, video


def test_cdpruner_ends_where_tokens_repeat_each_other() -> None:
    """B above D, B above the number of different tokens, tokens that are all zero."""
    assert prune(video(6, 10, 8), 1.0, "cdpruner").n_kept == 8
    assert prune(video(6, 10, 8), 1.0, "cdpruner", mode="per_frame").n_kept == 6 * 8
    copies = video(1, 5, 32).expand(6, 5, 32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        index = prune(copies.to(dtype), 0.5, "cdpruner").index
        assert sorted((index % 5).tolist()) == [0, 1, 2, 3, 4]
    images = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1, 0]]), 4).float()
    evidence = {"image_embedding": images, "text_embedding": -images[:, 2]}
    assert gstep.prune(torch.zeros(1, 4, 8), 1.0, "cdpruner", evidence=evidence).index.tolist() == [2]


def test_cdpruner_relevance() -> None:
    images = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[-3.0, 0.0], [0.0, 0.0]]])
    text = torch.tensor([[1.0, 0.0]])
    expected = torch.tensor([[5e-7, 0.5], [1.0, 0.5]])  # low where the cosine is high, as in the official code
    assert torch.allclose(compute_relevance(images, text), expected, atol=1e-6)
    assert compute_relevance(images[:1, :1], text).tolist() == [[1.0]]


def test_cdpruner_embeddings_must_be_of_one_size() -> None:
    evidence = {"image_embedding": torch.ones(2, 3, 5), "text_embedding": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"'text_embedding' must be \[Q,De\] = \[Q, 5\] .*; got shape \[2, 4\]"):
        gstep.prune(video(2, 3, 4), method="cdpruner", evidence=evidence)
