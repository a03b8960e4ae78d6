"""VisionZip where golden cases do not reach: counts, sums, targets, and the rules for Qwen."""

import torch

import gstep
from gstep.pruners.visionzip import average_nearest, count_frame_tokens, find_densest
from tests.gstep.synthetic import prune, video


def test_visionzip_per_frame() -> None:
    cases = [(196, 0.25, 50), (196, 0.15, 30), (196, 0.5, 98), (100, 0.25, 25), (16, 0.1, 2), (16, 0.001, 2)]
    for size, ratio, kept in (*cases, (1, 0.5, 1), (1, 1.0, 1), (49, 1.0, 49)):
        assert count_frame_tokens(size, ratio) == kept


def test_visionzip_sums_end_at_the_largest_number() -> None:
    tokens = torch.full((1, 8, 4), 60000.0, dtype=torch.float16)
    pruned = prune(tokens, method="visionzip", budget=2)
    assert pruned.merged is not None
    assert (pruned.tokens[pruned.merged] == torch.finfo(torch.float16).max).all()


def test_visionzip_share_of_dominant_tokens() -> None:
    """Of four kept ones: three by the published split, two by half; and one is contextual whatever the share."""
    for share, n_dominant in ((None, 3), (0.5, 2), (0, 0), (1 - 1e-12, 3)):
        pruned = prune(video(2, 16, 4), 0.25, "visionzip", dominant_share=share)
        assert pruned.merged is not None
        assert pruned.merged.view(2, 4).sum(dim=1).tolist() == [4 - n_dominant] * 2


# Two long tokens, and three on each side of the origin whose cosines are 0.8 and 0.28 (those to the other side: -0.28,
# -0.8 and -1).
UP, MIDDLE, DOWN = [1.6, 1.2], [5.0, 0.0], [4.0, -3.0]
BACK_UP, BACK, BACK_DOWN = [-4.0, 3.0], [-5.0, 0.0], [-0.8, -0.6]
FRAME = [UP, [0.0, 9.0], MIDDLE, DOWN, BACK_UP, [10.0, 0.0], BACK, BACK_DOWN]


def mean(*rows: list[float]) -> list[float]:
    average: list[float] = torch.tensor(rows, dtype=torch.float64).mean(dim=0).tolist()
    return average


def directions(*degrees: float) -> torch.Tensor:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def test_visionzip_qwen_by_hand() -> None:
    """Four of eight: two long ones, and the middle of each side. The second frame is the first one backwards."""
    tokens = torch.tensor([FRAME, FRAME[::-1]])
    pruned = gstep.prune(tokens, 0.5, "visionzip", variant="qwen", neighbours=2)
    assert pruned.index.tolist() == [1, 2, 5, 6, *(8 + place for place in (1, 2, 5, 6))]
    assert pruned.merged is not None
    assert pruned.merged.tolist() == [False, True, False, True, True, False, True, False]
    front, back = mean(UP, MIDDLE, DOWN), mean(BACK_UP, BACK, BACK_DOWN)
    expected = [[0.0, 9.0], front, [10.0, 0.0], back, back, [10.0, 0.0], front, [0.0, 9.0]]
    assert torch.allclose(pruned.tokens, torch.tensor(expected))


def test_visionzip_qwen_ties_go_to_the_lowest_index() -> None:
    """With all five others as neighbours the six are equally dense: the sum of their directions is zero."""
    pruned = gstep.prune(torch.tensor([FRAME]), 0.5, "visionzip", variant="qwen")
    assert pruned.index.tolist() == [0, 1, 2, 5]
    # BACK is nearer to UP (-0.8) than to MIDDLE (-1), and DOWN nearer to MIDDLE (0.8) than to UP (0.28).
    expected = [mean(UP, BACK_UP, BACK), [0.0, 9.0], mean(MIDDLE, DOWN, BACK_DOWN), [10.0, 0.0]]
    assert torch.allclose(pruned.tokens, torch.tensor(expected))
    equal = gstep.prune(video(1, 1, 8).expand(2, 37, 8), 0.25, "visionzip", variant="qwen")
    assert equal.index.tolist() == [*range(9), *range(37, 46)]


def test_visionzip_qwen_frames_do_not_touch_each_other() -> None:
    tokens = video(5, 30, 16)
    whole = gstep.prune(tokens, 0.2, "visionzip", variant="qwen")
    assert whole.compute_selection_order().tolist() == list(range(len(whole.index)))  # prompts in ascending index
    alone = [gstep.prune(frame[None], 0.2, "visionzip", variant="qwen") for frame in tokens]
    assert torch.equal(whole.tokens, torch.cat([pruned.tokens for pruned in alone]))


# Recorded from compress_features of the official code (core.py at a85d485) on video(*shape, seed=7).double(): indices,
# which of the kept rows differ from the token at their index, and the mean of each row.
def test_visionzip_qwen_keeps_what_the_official_code_keeps() -> None:
    tokens, index = video(3, 20, 8, seed=7), [1, 6, 9, 12, 16, 24, 25, 31, 32, 34, 42, 43, 45, 51, 52]
    means = [0.139034, 0.558406, 0.076713, -0.132918, 0.328639, 0.317614, 0.489036, -0.596874]
    means += [0.147363, 0.480586, 0.993521, 0.028278, 0.096038, 0.153385, 0.599387]
    pruned = gstep.prune(tokens, 0.25, "visionzip", variant="qwen")
    assert pruned.index.tolist() == index
    assert pruned.merged is not None and pruned.merged.nonzero().flatten().tolist() == [0, 2, 5, 8, 11, 13]
    assert torch.equal((pruned.tokens != tokens.flatten(0, 1)[index]).any(dim=1), pruned.merged)
    assert torch.allclose(pruned.tokens.mean(dim=1), torch.tensor(means), atol=2e-6)


def test_visionzip_qwen_counts() -> None:
    for size, ratio, kept, contextual in (
        *[(20, 0.25, 5, 2), (20, 0.15, 3, 2), (20, 0.1, 2, 1), (49, 0.25, 12, 5), (90, 0.7, 63, 26)],
        *[(20, 0.05, 1, 0), (20, 0.001, 1, 0), (1, 0.25, 1, 0), (1, 1.0, 1, 0), (2, 1.0, 2, 1), (9, 1.0, 9, 4)],
    ):
        pruned = gstep.prune(video(3, size, 8), ratio, "visionzip", variant="qwen")
        assert pruned.n_kept == 3 * kept == gstep.make_pruner("visionzip", variant="qwen").at_most(3, size, 8, ratio)
        assert pruned.merged is not None
        assert pruned.merged.view(3, kept).sum(dim=1).tolist() == [contextual] * 3


def test_visionzip_qwen_keeps_the_longest_where_it_keeps_one_and_changes_none_where_it_keeps_all() -> None:
    tokens = video(4, 9, 8)
    pruned = gstep.prune(tokens, 0.12, "visionzip", variant="qwen")
    assert (pruned.index % 9).tolist() == tokens.norm(dim=2).argmax(dim=1).tolist()
    assert torch.equal(pruned.tokens, tokens.flatten(0, 1)[pruned.index])
    parallel = video(2, 1, 8) * torch.arange(1.0, 10.0)[:, None]  # each is as near to one as to another
    assert torch.equal(gstep.prune(parallel, 1.0, "visionzip", variant="qwen").tokens, parallel.flatten(0, 1))


def test_visionzip_densest_counts_no_token_as_its_own_neighbour() -> None:
    """A pair that is close beats a token in the middle of three others at a distance, until it needs more company."""
    direction = directions(0, 20, 35, 50, 200, 205)
    assert find_densest(direction, 2, neighbours=1).tolist() == [4, 5]
    assert find_densest(direction, 1, neighbours=2).tolist() == [2]
    assert find_densest(direction, 2, neighbours=2).tolist() == [1, 2]
    # A zero token has cosine 0 with everything, which is more than two opposite ones have on average.
    opposite = torch.cat([directions(0, 180), torch.zeros(1, 2)])
    assert find_densest(opposite, 1, neighbours=2).tolist() == [2]


def test_visionzip_rounding_decides_no_tie() -> None:
    """The second pair is nearer by a part in 10^14, and the second anchor to what lies in the middle."""
    assert find_densest(directions(0, 10, 90, 100 - 1e-11), 2, neighbours=1).tolist() == [0, 1]
    direction = directions(0, 20 - 1e-11, 10)
    means = average_nearest(direction, direction, torch.tensor([0, 1]))
    assert means.tolist() == [mean(*direction[[0, 2]].tolist()), direction[1].tolist()]


def test_visionzip_of_equal_anchors_the_first_gets_everything() -> None:
    tokens = torch.tensor([[1.0, 0.0], [1.0, 0.0], [4.0, 3.0], [0.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    direction = torch.nn.functional.normalize(tokens, dim=1)
    means = average_nearest(tokens, direction, torch.tensor([0, 1, 4]))
    # The zero token, of cosine 0 with every anchor, goes to the first one too.
    assert means.tolist() == [mean(*tokens[:4].tolist()), [1.0, 0.0], [-1.0, 0.0]]
