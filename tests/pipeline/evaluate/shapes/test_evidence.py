"""Where the answer is seen, and whether kept tokens still show it."""

import numpy as np
import pytest

from pipeline.evaluate.shapes.evidence import Evidence, Part, coverage, parts_kept
from pipeline.evaluate.shapes.hardness import HARDNESS
from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.world import SIDE, Box
from tests.pipeline.evaluate.shapes.shape_videos import videos

TWICE = Part("star", 1.0, (Box(1, 0, 0, 16, 16), Box(2, 80, 80, 96, 96)))
ELSEWHERE = Part("ring", 0.5, (Box(3, 40, 40, 56, 56),))


def kept_at(*cells, n_frames=8, grid=6):
    kept = np.zeros((n_frames, grid, grid), bool)
    for cell in cells:
        kept[cell] = True
    return kept


def test_a_cell_is_covered_by_as_much_as_the_boxes_overlap_it():
    share = coverage([Box(1, 8, 16, 24, 32), Box(1, 24, 16, 32, 32)], 2, 6)
    assert share.shape == (2, 6, 6) and not share[0].any()
    assert share[1, 1, :3].tolist() == [0.5, 1.0, 0.0] and share.sum() == 1.5


@pytest.mark.parametrize("grid", [6, 7, 12, 14])
def test_coverage_adds_up_to_the_area(grid):
    boxes = [Box(0, 3, 7, 20, 21), Box(1, 80, 50, 96, 69)]
    area = [(b.x1 - b.x0) * (b.y1 - b.y0) for b in boxes]
    assert coverage(boxes, 2, grid).sum((1, 2)) * (SIDE / grid) ** 2 == pytest.approx(area)


def test_any_sight_of_each_part_will_do_unless_the_first_is_needed():
    anywhere, onset = (Evidence(8, needs, (TWICE, ELSEWHERE)) for needs in ("any", "first"))
    early, late = (1, 0, 0), (2, 5, 5)
    ring = (3, 2, 3)
    assert parts_kept(anywhere, kept_at(late, ring)) == [True, True]
    assert parts_kept(anywhere, kept_at(late)) == [True, False]
    assert parts_kept(onset, kept_at(late, ring)) == [False, True]
    assert parts_kept(onset, kept_at(early, ring)) == [True, True]
    assert parts_kept(anywhere, ~kept_at(early, late)) == [False, True]
    assert parts_kept(anywhere, kept_at((0, 0, 0), (1, 5, 5))) == [False, False]


def test_a_part_counts_as_shown_from_a_share_of_a_cell_on():
    evidence = Evidence(8, "any", (ELSEWHERE,))
    assert parts_kept(evidence, kept_at((3, 2, 2)), least=0.2) == [True]  # 8 x 8 of its 16 x 16 pixels
    assert parts_kept(evidence, kept_at((3, 2, 2)), least=0.25) == [False]


def test_a_token_may_stand_for_several_frames():
    evidence = Evidence(8, "any", (ELSEWHERE,))
    assert parts_kept(evidence, kept_at((1, 3, 3), n_frames=4)) == [True]
    assert parts_kept(evidence, kept_at((2, 3, 3), n_frames=4)) == [False]


@pytest.mark.parametrize("hardness", [pytest.param(name, id=name) for name in HARDNESS])
def test_the_evidence_of_a_question_is_where_its_things_are(hardness):
    for video in videos(30, hardness):
        boxes_of = {thing.name: {thing.box(shot) for shot in thing.shots} for thing in video.things}
        for question in ask(video):
            evidence, parts = question.evidence, question.evidence.parts
            assert evidence.n_frames == video.n_frames
            assert evidence.needs == ("first" if question.type in ("quarter", "order", "onset") else "any")
            assert all(part.boxes and set(part.boxes) <= boxes_of[part.name] for part in parts)
            shown = {box for part in parts for box in part.boxes}
            if question.type in ("order", "onset"):
                assert {part.name for part in parts} == set(question.choices)
                assert min(parts, key=lambda part: part.boxes[0].frame).name == question.right
            elif question.type == "count":
                assert ("one", "two", "three", "four").index(question.right) + 1 == len(parts)
                assert shown == boxes_of[question.subject]
            elif question.type == "change":
                cut = next(cut for cut in video.cuts if {cut - 1, cut} <= {b.frame for b in boxes_of[question.subject]})
                assert {box.frame >= cut for box in shown} == {"later" in question.prompt}
            else:
                assert len(parts) == 1 and shown == boxes_of[parts[0].name]


def test_all_tokens_show_every_part_and_none_shows_nothing():
    for video in videos(12):
        everything = np.ones((video.n_frames, 6, 6), bool)
        for question in ask(video):
            assert all(parts_kept(question.evidence, everything))
            assert not any(parts_kept(question.evidence, ~everything))
