"""OTT-Vid where golden cases do not reach: any budget, the division of merges, transport, trees."""

import pytest
import torch

from gstep.pruners.ottvid import divide_merges, plan_transport
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


def test_ottvid_drops_what_is_too_far_and_keeps_the_count() -> None:
    tokens = video(1, 16, 8).repeat(5, 1, 1) + 0.5 * video(5, 16, 8, seed=1)
    kept = [prune(tokens, 0.25, "ottvid", theta=theta) for theta in (0.0, 0.1, 1.0)]
    assert [pruned.n_kept for pruned in kept] == [20, 20, 20]
    assert len({tuple(pruned.index.tolist()) for pruned in kept}) == 1
    n_merged = [int(pruned.merged.sum()) for pruned in kept if pruned.merged is not None]
    assert n_merged[0] == 0 < n_merged[1] < n_merged[2]
