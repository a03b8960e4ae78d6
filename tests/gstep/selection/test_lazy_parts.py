"""The parts of the lazy selection: rows, survey, picks, the bound on cosines, and products of pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from gstep.selection import lazy
from gstep.selection.lazy import (
    MARGIN,
    ConvertedTokens,
    Picks,
    Subspace,
    lazy_density_guided_fps,
    pair_products,
    survey_tokens,
)
from tests.gstep.selection.videos import KINDS, density, video


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_lengths_and_rows_are_the_tokens_own(dtype: torch.dtype) -> None:
    tokens = video("low rank").flatten(0, 1).to(dtype)
    tokens[7] = 0
    rows = ConvertedTokens.of(tokens)
    assert rows.ready == (dtype != torch.bfloat16)
    assert torch.equal(torch.cat([part for _, part in rows.chunks()]), tokens.to(rows.dtype))
    assert torch.equal(rows.take(np.array([5, 3])), tokens[[5, 3]].to(rows.dtype))
    inverse = survey_tokens(rows, 0).inverse
    assert inverse[7] == 0
    norms = tokens.double().norm(dim=1).numpy()
    assert np.allclose(np.delete(inverse * norms, 7), 1, atol=1e-5)


def test_huge_tokens_are_scaled_a_few_at_a_time() -> None:
    tokens = video("low rank").flatten(0, 1).float() * 2.0**100
    rows = ConvertedTokens.of(tokens)
    assert not rows.ready and rows.factor is not None and rows.factor.max() < 1
    assert np.isfinite(survey_tokens(rows, 0).inverse).all() and (survey_tokens(rows, 0).inverse > 0).all()


def test_copies_are_found_wherever_they_are() -> None:
    tokens = video("random").flatten(0, 1)
    assert not survey_tokens(ConvertedTokens.of(tokens)).has_copies
    tokens[500] = tokens[3]
    assert survey_tokens(ConvertedTokens.of(tokens)).has_copies


def test_a_subspace_is_kept_only_where_it_tells_something() -> None:
    alike = video("low rank").flatten(0, 1).float()
    unlike = torch.randn(600, 4096, generator=torch.Generator().manual_seed(0))
    told, nothing = (Subspace.of(normalize(tokens), 32).residual for tokens in (alike, unlike))
    assert told < 0.5 and nothing > 0.95
    coordinates = survey_tokens(ConvertedTokens.of(alike), 32).coordinates
    assert coordinates is not None and coordinates.shape == (12 * 49, 33)
    assert survey_tokens(ConvertedTokens.of(unlike), 32).coordinates is None
    assert survey_tokens(ConvertedTokens.of(alike)).coordinates is not None
    assert survey_tokens(ConvertedTokens.of(alike[:384])).coordinates is None  # too few tokens for a sample


def test_picks_know_what_the_survey_knows_of_them() -> None:
    tokens = video("low rank").flatten(0, 1)
    survey = survey_tokens(ConvertedTokens.of(tokens), 16)
    picks = Picks(5, survey)
    picks.add(np.array([40]))
    picks.add(np.array([3, 8]))
    assert picks.count == 3 and picks.order[:3].tolist() == [40, 3, 8]
    assert torch.equal(picks.rows[:3], tokens[[40, 3, 8]].float())
    assert picks.inverse[:3].tolist() == survey.inverse[[40, 3, 8]].tolist()
    assert picks.coordinates is not None and survey.coordinates is not None
    assert torch.equal(picks.coordinates[:3], survey.coordinates[[40, 3, 8]])


@pytest.mark.parametrize("kind", KINDS)
def test_no_cosine_is_above_its_bound(kind: str) -> None:
    tokens = video(kind, hidden=512).flatten(0, 1).float()
    tokens[5], tokens[7] = 0, tokens[8]
    unit = normalize(tokens.double(), dim=1)
    for dims in (1, 16, 64):
        subspace = Subspace.of(unit[::2].float(), dims)
        inverse = tokens.norm(dim=1).reciprocal().nan_to_num(posinf=0)
        coordinates = subspace.coordinates(tokens, inverse)
        slack = (coordinates @ coordinates.T).double() - unit @ unit.T
        assert slack.min() > -MARGIN / 3
        assert -1e-6 < subspace.residual <= 1 + 1e-6
    if kind == "low rank":  # else a bound that is always 2 would do
        assert slack.mean() < 0.2


def test_products_of_pairs_without_the_sparse_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = torch.from_numpy(rng.normal(size=(2, 300, 65))).float()
    row, column = np.sort(rng.integers(0, 300, 700)), rng.integers(0, 300, 700)
    expected = (a[row].double() * b[column].double()).sum(dim=1).numpy()
    assert np.abs(pair_products(a, b, row, column) - expected).max() < 1e-5
    tokens = video("low rank").flatten(0, 1)
    rho = density(tokens[None])
    with_it = lazy_density_guided_fps(tokens, rho, 100)
    monkeypatch.setattr(lazy, "_has_sampled_products", lambda: False)
    assert np.abs(pair_products(a, b, row, column) - expected).max() < 1e-5
    assert len(pair_products(a, b, row[:0], column[:0])) == 0
    assert set(lazy_density_guided_fps(tokens, rho, 100).tolist()) == set(with_it.tolist())
