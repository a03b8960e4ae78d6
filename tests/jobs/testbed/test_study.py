"""jobs.testbed study: what is knocked out, what counts as seen, that counts add up, and what is refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gstep.language import Visual
from jobs.testbed.__main__ import main
from jobs.testbed.studying.cases import ABOUT_ONSETS, Case, FilmedCases, Onset, read_films
from jobs.testbed.studying.knock_out import VARIANTS, kept_by_variant, others, touched
from jobs.testbed.studying.measure import Outcome, kept_cells, measure
from jobs.testbed.studying.reading import only
from jobs.testbed.studying.record import by_kind, record_of
from jobs.testbed.training.checkpoint import write_checkpoint
from jobs.testbed.training.decoder import Decoder
from jobs.testbed.training.network import Eyes
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.shapes.evidence import Evidence, Part
from pipeline.evaluate.shapes.questions import ask
from pipeline.evaluate.shapes.world import SIDE, Box
from pipeline.evaluate.statistics.score_matrix import Arm
from tests.jobs.jobs import run
from tests.jobs.test_help import HEAVY
from tests.pipeline.evaluate.shapes.shape_videos import videos

GRID = 6
METHODS = ("random", "gstep", "visionzip", "fastv")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "d"
    assert main(["make", str(folder), "--videos", "3", "--durations", "short"]) == 0
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random weights of the real shape."""
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, Eyes(), Decoder().state_dict())
    return path


def study(folder, out, *options):
    return main(["study", str(folder), "--out", str(out), *options])


@pytest.fixture(scope="module")
def done(folder, model, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    options = ("--model", str(model), "--method", *METHODS, "--retention-ratio", "0.1", "1")
    assert study(folder, out, *options) == 0
    return out, options


@pytest.fixture(scope="module")
def record(done):
    return json.loads((done[0] / "study.json").read_text())


def said(captured):
    return " ".join(captured.split())


def test_what_is_knocked_out_is_what_the_boxes_touch():
    for video in videos(6):
        for question in ask(video):
            pixels = np.zeros((video.n_frames, SIDE, SIDE), bool)
            for part in question.evidence.parts:
                for t, x0, y0, x1, y1 in part.boxes:
                    pixels[t, y0:y1, x0:x1] = True
            side = SIDE // GRID
            cells = pixels.reshape(-1, GRID, side, GRID, side).any((2, 4))
            assert (touched(question.evidence, GRID) == cells.reshape(-1)).all() and cells.any()


def test_as_many_others_are_taken_beside_them_by_seed_and_question():
    for video in videos(6):
        for question in ask(video):
            shown = touched(question.evidence, GRID)
            taken = others(shown, 0, "001-1")
            assert not (taken & shown).any() and taken.sum() == min(shown.sum(), (~shown).sum())
            assert (taken == others(shown, 0, "001-1")).all()
            for other in (others(shown, 1, "001-1"), others(shown, 0, "001-2")):
                assert other.sum() == taken.sum() and (2 * shown.sum() >= len(shown) or (other != taken).any())


def test_every_variant_is_made_of_the_evidence_and_the_others():
    shown = np.zeros(72, bool)
    shown[5:15] = True
    kept = kept_by_variant(shown, 0, "001-1")
    assert list(kept) == list(VARIANTS)
    assert [sets.sum() for sets in kept.values()] == [72, 62, 62, 10, 0]
    assert not kept["without_evidence"][5:15].any() and kept["without_others"][5:15].all()
    assert (kept["evidence_alone"] == shown).all()


def test_onsets_are_those_of_the_named_things_each_once(folder):
    films = read_films(folder)
    assert len(films) == 3 and len(read_films(folder, 2)) == 2
    for film in films:
        parts = {part for case in film.cases if case.type in ABOUT_ONSETS for part in case.evidence.parts}
        assert [onset.evidence.needs for onset in film.onsets] == ["first"] * len(parts)
        assert {onset.evidence.parts[0] for onset in film.onsets} == parts
        for kind, evidence in film.onsets:
            frames = {box.frame for box in evidence.parts[0].boxes}
            places = {box[1:3] for box in evidence.parts[0].boxes}
            assert kind in ("brief", "static", "moving") and (kind == "moving" or len(places) == 1)
            assert kind != "brief" or len(frames) <= 3


def hand_made():
    """Two frames-and-cells of a star (brief, from frame 1) and a ring (static, from frame 2), and two questions."""
    star = Part("star", 1.0, (Box(1, 0, 0, 16, 16), Box(2, 0, 0, 16, 16)))
    ring = Part("ring", 1.0, (Box(2, 80, 80, 96, 96), Box(3, 80, 80, 96, 96)))
    item = Item(question_id="q", video_ids=("v",), question="?", expected="A", cluster="v", answer=0)

    def case(kind, needs, *parts):
        return Case(
            Item(**{**vars(item), "splits": {"task_type": kind}, "question_id": kind}), Evidence(8, needs, parts)
        )

    cases = (case("color", "any", star), case("order", "first", star, ring), case("shape", "any", ring))
    onsets = (Onset("brief", Evidence(8, "first", (star,))), Onset("static", Evidence(8, "first", (ring,))))
    return FilmedCases("v.mp4", cases, onsets)


class Known:
    """A reader that is right wherever the first cell of frame 2 is there."""

    device = "cpu"

    def look(self, film):
        return Visual(torch.zeros(8 * 36, 4), torch.arange(8 * 36), 8, 36)

    def right(self, cases, visuals, positions, inside=None):
        return [inside is not None or bool((visual.index == 72).any()) for visual in visuals]


class Keeps:
    """A method that keeps these tokens."""

    inside = None

    def __init__(self, *index):
        self.index = index

    def select(self, visual, device):
        return None

    def kept(self, visual, pruned):
        return only(visual, np.isin(np.arange(8 * 36), self.index))


def test_counts_of_a_video_counted_by_hand():
    late, corner = 2 * 36, 2 * 36 + 35  # the star after its onset; the ring in its onset
    inside = SimpleNamespace(inside=("fastv", 0.25))
    prunings = {Arm("one", 0.5): Keeps(late, corner), Arm("two", 0.25): Keeps(36), Arm("fastv", 0.25): inside}
    made = record_of(measure([hand_made()], Known(), prunings, positions="original"), {"model": "m"})
    one, two, fastv = made["methods"]
    assert (one["method"], two["method"], fastv["method"]) == ("one", "two", "fastv")
    assert {kind: (share["yes"], share["count"]) for kind, share in one["onsets"].items()} == {
        "brief": (0, 1),
        "static": (1, 1),
        "all": (1, 2),
    }
    assert [two["onsets"][kind]["yes"] for kind in ("brief", "static", "all")] == [1, 0, 1]
    assert [one[name]["count"] for name in ("seen", "gone")] == [2, 1]  # of the order the star's onset is missing
    assert [one[name]["yes"] for name in ("seen", "gone")] == [2, 1]
    assert [two[name]["count"] for name in ("seen", "gone")] == [1, 2] and two["by_type"]["all"]["yes"] == 0
    assert fastv["seen"] is fastv["gone"] is fastv["onsets"] is None and fastv["by_type"]["all"]["yes"] == 3
    # The ring's question alone keeps the star's cell where its own evidence is taken away.
    assert {kind: share["yes"] for kind, share in made["knock_out"]["without_evidence"].items()} == {
        "color": 0,
        "shape": 1,
        "order": 0,
        "all": 1,
    }
    assert made["knock_out"]["all"]["all"]["yes"] == 3 and made["knock_out"]["none"]["all"]["yes"] == 0


def test_a_sliver_of_a_thing_counts_only_where_any_share_does():
    sliver = Part("star", 1.0, (Box(1, 0, 0, 18, 16),))  # an eighth of the second cell
    film = FilmedCases("v.mp4", hand_made().cases[:1], (Onset("brief", Evidence(8, "first", (sliver,))),))
    for least, kept in ((0.0, 1), (0.1, 1), (0.125, 0)):
        found = measure([film], Known(), {Arm("one", 0.5): Keeps(37)}, positions="original", least=least)
        assert sum(onset.so for onset in found.onsets[Arm("one", 0.5)]) == kept


def test_kept_cells_are_frame_row_and_column():
    kept = kept_cells(Visual(torch.zeros(2, 4), torch.tensor([7, 36 + 12]), 8, 36), GRID)
    assert kept.shape == (8, 6, 6) and np.argwhere(kept).tolist() == [[0, 1, 1], [1, 2, 0]]


def test_errors_are_of_videos_not_of_questions():
    def outcomes(*videos):
        return [Outcome(f"v{i}", "color", bool(so)) for i, video in enumerate(videos) for so in video]

    def error(found):
        return by_kind(found, ["color"])["color"]["error"]

    alone = error(outcomes([1], [0], [1], [0]))
    assert error(outcomes([1, 1], [0, 0], [1, 1], [0, 0])) == pytest.approx(alone)
    assert alone == pytest.approx((0.25 / 3) ** 0.5)
    assert error(outcomes([1, 0])) is None and by_kind([], ["color"]) == {"all": {"yes": 0, "count": 0, "error": None}}


@pytest.mark.slow
def test_the_counts_add_up_to_all_questions(folder, record):
    cases = [case for film in read_films(folder) for case in film.cases]
    onsets = sum(len(film.onsets) for film in read_films(folder))
    assert record["about"]["videos"] == 3 and record["about"]["questions"] == len(cases)
    tables = [*record["knock_out"].values(), *(one["by_type"] for one in record["methods"])]
    assert list(record["knock_out"]) == list(VARIANTS) and len(record["methods"]) == 2 * len(METHODS)
    for shares in tables:
        for key in ("yes", "count"):
            assert sum(share[key] for kind, share in shares.items() if kind != "all") == shares["all"][key]
        assert shares["all"]["count"] == len(cases) and {*shares} == {case.type for case in cases} | {"all"}
    for one in record["methods"]:
        assert (one["seen"] is None) == (one["onsets"] is None) == (one["method"] == "fastv")
        if one["seen"] is not None:
            for key in ("yes", "count"):
                assert one["seen"][key] + one["gone"][key] == one["by_type"]["all"][key]
            assert one["onsets"]["all"]["count"] == onsets


@pytest.mark.slow
def test_a_method_that_keeps_all_answers_as_all_tokens_do(record):
    """FastV by another path through the model, whose last bits may differ."""
    whole = [one for one in record["methods"] if one["retention_ratio"] == 1 and one["method"] in ("random", "gstep")]
    assert len(whole) == 2
    for one in whole:
        assert one["by_type"] == record["knock_out"]["all"]
        assert one["gone"]["count"] == 0 and one["onsets"]["all"]["yes"] == one["onsets"]["all"]["count"]


@pytest.mark.slow
def test_the_same_command_writes_the_same_bytes_and_prints_them(folder, done, tmp_path, capsys):
    out, options = done
    assert study(folder, tmp_path / "again", *options) == 0
    for name in ("study.md", "study.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    text = (out / "study.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    for title in ("## Knock-out", "## Seen or gone", "## Onsets", "## By type of question", "### 10 % kept"):
        assert f"\n{title}\n" in text
    assert str(folder) not in text + (out / "study.json").read_text()


@pytest.mark.slow
def test_by_default_every_method_that_the_model_can_run_is_asked(folder, model, tmp_path):
    options = ("--model", str(model), "--videos", "1", "--retention-ratio", "0.2", "--positions", "original")
    assert study(folder, tmp_path / "o", *options) == 0
    made = json.loads((tmp_path / "o" / "study.json").read_text())
    methods = [one["method"] for one in made["methods"]]
    assert methods == ["random", "uniform", "topk", "fps", "gstep", "novelty", "vidcom2", "visionzip", "fastv"]
    assert made["about"]["videos"] == 1 and made["about"]["positions"] == "original"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "nonsense"), "unknown method 'nonsense'; known: none, random"),
        (("--method", "gstep,alfa=1"), "alfa"),
        (("--method", "fastvid"), "--method fastvid needs frame_feature, token_attention from SigLIP's"),
        (
            ("--method", "cdpruner"),
            "leave it out: those that run are random, uniform, topk, fps, gstep, novelty, vidcom2",
        ),
        (("--method", "fastv,K=30"), "this model has"),
        (("--model", "tiny-qwen2-5-vl"), "a study needs tokens frame by frame"),
        (("--model", "nowhere/at/all"), "nowhere/at/all"),
        (("--seed", "-1"), "--seed must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_anything_is_written(
    folder, model, tmp_path, capsys, options, message
):
    assert study(folder, tmp_path / "o", "--model", str(model), *options) == 2
    assert message in said(capsys.readouterr().err) and not (tmp_path / "o").exists()


def test_folders_that_are_none_are_refused(folder, tmp_path, capsys):
    assert study(tmp_path / "nowhere", tmp_path / "o") == 2
    assert f"{tmp_path / 'nowhere'}: there is no evidence.jsonl in it; make it with" in said(capsys.readouterr().err)
    (tmp_path / "f").write_text("mine")
    assert study(folder, tmp_path / "f") == 2
    assert "is a file: name a folder" in said(capsys.readouterr().err)


def test_a_folder_of_another_version_is_refused(folder, tmp_path, capsys):
    other = tmp_path / "d"
    shutil.copytree(folder, other)
    rows = [json.loads(line) for line in (other / "manifest.jsonl").read_text().splitlines()]
    rows[1]["seed"] = rows[0]["seed"]
    (other / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert study(other, tmp_path / "o") == 2
    assert f"{rows[1]['video_id']} is not what this version makes of its seed" in said(capsys.readouterr().err)
    next((other / "data").iterdir()).unlink()
    assert study(other, tmp_path / "o") == 2
    assert ".mp4" in (message := said(capsys.readouterr().err)) and "make it with" in message
    shutil.copytree(folder / "data", other / "data", dirs_exist_ok=True)
    (other / "evidence.jsonl").write_text("")
    assert study(other, tmp_path / "o") == 2
    assert "evidence.jsonl does not have the question 001-1; make it with" in said(capsys.readouterr().err)


def test_help_loads_nothing_heavy():
    done = run("jobs.testbed", "study", "--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stdout.splitlines() if line.startswith("import time:")}
    assert "jobs.testbed.study" in loaded and not (HEAVY | {"numpy"}) & loaded
