"""OTT-Vid where golden cases do not reach: any budget, the division of merges, transport, trees."""

import pytest
import torch

import gstep
from gstep.pruners.ottvid import divide_merges, merge_trees, pick_covering, plan_transport
from gstep.pruners.vectors import normalize_rows
from tests.gstep.synthetic import prune, video


def test_ottvid_keeps_the_budget_and_a_token_of_each_frame_where_it_can() -> None:
    for shape in ((6, 16, 8), (9, 3, 8), (5, 1, 8), (1, 12, 8)):
        tokens = video(*shape)
        for budget in range(1, shape[0] * shape[1] + 1):
            pruned = prune(tokens, method="ottvid", budget=budget)
            assert pruned.n_kept == budget
            if budget >= shape[0]:
                assert len((pruned.index // shape[1]).unique()) == shape[0]
    assert torch.equal(prune(tokens, 1.0, "ottvid").tokens, tokens.flatten(0, 1))


def test_ottvid_picks_cover_what_is_attended() -> None:
    """Two groups of directions: one pick is the middle of the heavier group, two picks are of both groups."""
    degrees = torch.tensor([[0.0, 10.0, 20.0, 180.0, 182.0]]).deg2rad()
    direction = torch.stack([degrees.cos(), degrees.sin()], dim=-1)
    for attention, picks in (([1.0, 1.0, 1.0, 0.1, 0.2], [[1], [1, 4]]), ([1.0, 1.0, 1.0, 9.0, 20.0], [[4], [1, 4]])):
        weight = torch.tensor([attention], dtype=torch.float64)
        assert [pick_covering(direction, weight, count)[0][0].tolist() for count in (1, 2)] == picks
    pick, similarity = pick_covering(normalize_rows(video(3, 9, 4)), torch.ones(3, 9, dtype=torch.float64), 4)
    directions = normalize_rows(video(3, 9, 4))
    for t in range(3):
        assert torch.allclose(similarity[t], directions[t] @ directions[t, pick[t]].T, atol=1e-6)


@pytest.mark.parametrize(
    ("price", "merges", "most", "expected"),
    [
        ([0.0, 0.0, 0.0], 7, 9, [3, 2, 2]),  # equal fractions: the earlier
        ([0.0, 10.0, 10.0], 6, 9, [6, 0, 0]),
        ([0.0, 10.0, 10.0], 6, 3, [3, 2, 1]),  # what does not fit is divided again
        ([0.0, 10.0], 6, 3, [3, 3]),
    ],
)
def test_ottvid_divides_merges(price: list[float], merges: int, most: int, expected: list[int]) -> None:
    assert divide_merges(torch.tensor(price, dtype=torch.float64), merges, most, 1.0) == expected


def test_ottvid_transports_all_mass_at_the_lowest_cost() -> None:
    mass = torch.softmax(torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=1)
    cost = torch.rand(1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan = plan_transport(mass, cost, 0.05, 2000)[0]
    assert torch.allclose(plan.sum(dim=1), mass[0]) and torch.allclose(plan.sum(dim=0), mass[1], atol=1e-6)
    for eps in (0.005, 10.0):  # the smallest that is accepted stays finite at costs of 0 and 1
        assert plan_transport(mass, cost.round(), eps, 200).isfinite().all()
    assert (plan * cost[0]).sum() < (mass[0][:, None] * mass[1] * cost[0]).sum()


def test_ottvid_merges_chains_to_their_first_frame() -> None:
    tokens = torch.tensor([[[1.0], [2.0]], [[3.0], [5.0]], [[7.0], [11.0]]])
    mean = merge_trees(tokens, torch.tensor([[0, 0], [1, -1]]))
    assert mean[0].flatten().tolist() == [(1 + 3 + 5 + 7) / 4, 2.0]
    assert mean[2, 1].item() == 11.0


def test_ottvid_drops_what_is_too_far_and_keeps_the_count() -> None:
    tokens = video(1, 16, 8).repeat(5, 1, 1) + 0.5 * video(5, 16, 8, seed=1)
    kept = [prune(tokens, 0.25, "ottvid", theta=theta) for theta in (0.0, 0.1, 1.0)]
    assert [pruned.n_kept for pruned in kept] == [20, 20, 20]
    assert len({tuple(pruned.index.tolist()) for pruned in kept}) == 1
    n_merged = [int(pruned.merged.sum()) for pruned in kept if pruned.merged is not None]
    assert n_merged[0] == 0 < n_merged[1] < n_merged[2]


def test_ottvid_looks_at_the_grid() -> None:
    tokens = video(1, 12, 8).repeat(4, 1, 1) + video(4, 12, 8, seed=1)
    evidence = {"token_attention": torch.rand(4, 12, generator=torch.Generator().manual_seed(0))}
    square, line = (
        gstep.prune(tokens, 0.4, "ottvid", evidence=evidence, grid=grid, theta=1.0) for grid in ((3, 4), (1, 12))
    )
    assert not torch.equal(square.tokens, line.tokens)
    assert torch.equal(gstep.prune(tokens, 0.4, "ottvid", evidence=evidence, theta=1.0).tokens, square.tokens)
