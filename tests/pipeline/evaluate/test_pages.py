"""Pages of single videos: those that methods disagree on most, as a cache of what a method keeps would show them."""

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from rich.console import Console

from gstep.pruners.base import Pruner, Selection
from gstep.types import VisualTokens
from pipeline.cache.reader import TokenCache
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.pages import chosen_video, described, most_disputed, page_name, video_pages
from pipeline.evaluate.request import EvaluateRequest, prepare
from pipeline.evaluate.run import arms_of
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.evaluate.statistics.score_matrix import ORIGINAL, Arm
from pipeline.generate.late_pruning import LateAsked, LatePruning
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.inspect.page import draw_page
from pipeline.inspect.thumbnails import Pictures
from pipeline.prune.config import PruneConfig
from pipeline.prune.request import resolve
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.pipeline.asking import request_about, tiny_cache, write_questions

GSTEP, FPS = Arm("gstep", 0.25), Arm("fps", 0.25)
QUIET = Console(quiet=True)


def scores(*rows) -> pa.Table:
    """(question, video, what full retention, GSTEP and FPS got): 1 right, 0 wrong, - failed."""
    return pa.Table.from_pylist(
        [
            {
                "question_id": question, "video_id": video, "cluster": video, "splits": [], "n_options": 2,
                "method": arm.method, "retention_ratio": arm.ratio, "status": "failed" if sign == "-" else "ok",
                "right": sign == "1", "score": float(sign == "1"),
            }
            for question, video, signs in rows
            for arm, sign in zip((ORIGINAL, GSTEP, FPS), signs, strict=True)
        ],
        SCORE_SCHEMA,
    )  # fmt: skip


def test_videos_come_by_how_many_of_their_questions_are_disputed():
    table = scores(("1", "a", "110"), ("2", "b", "101"), ("3", "b", "011"), ("4", "c", "111"), ("5", "d", "000"))
    assert most_disputed(table, [GSTEP, FPS], 9) == ["b", "a"]
    assert most_disputed(table, [GSTEP, FPS], 1) == ["b"] and most_disputed(table, [GSTEP, FPS], 0) == []


def test_full_retention_takes_part_and_what_failed_does_not():
    table = scores(("1", "a", "100"), ("2", "b", "1-1"), ("3", "c", "--0"))
    assert most_disputed(table, [GSTEP, FPS], 9) == ["a"]
    assert most_disputed(table, [ORIGINAL, GSTEP, FPS], 9) == ["a"]
    assert most_disputed(scores(("1", "a", "110")), [GSTEP], 9) == []  # FPS is none of the arms


def test_a_page_has_a_name_whatever_the_video_and_the_method_are_called():
    names = [page_name(video, LateAsked("mine.mod:Class", 0.25, {"K": "3"})) for video in ("a/../../b", "ü?#", "a b")]
    assert len(set(names)) == 3
    for name in names:
        folder, _, file = name.partition("/")
        assert folder == "pages" and file.endswith("-mine.mod-Class-K=3-0.25.html")
        assert not set(file) & set("/?#%&: ")


@pytest.mark.parametrize(
    "other",
    [
        LateAsked("gstep", 0.1, {"alpha": "1e-5"}),
        LateAsked("gstep", 0.25),
        LateAsked("topk", 0.25, {"alpha": "1e-5"}),
        LateAsked("gstep", 0.25, {"alpha": "1e+5"}),
    ],
)
def test_two_methods_have_two_pages_of_a_video(other):
    assert page_name("a", LateAsked("gstep", 0.25, {"alpha": "1e-5"})) != page_name("a", other)


def cache_by(folder: Path, pruner: str, ratio: float = 1.0) -> TokenCache:
    """A cache of the videos a and b as a method leaves it, with the identity that jobs.prune gives it."""
    config = PruneConfig(pruner=pruner, retention_ratio=ratio, num_frames=4)
    job = resolve(config, MANIFEST_SCHEMA.empty_table(), LocalStore(folder), Objects.from_environment())
    tiny_cache(folder, ("a", "b"), ratio=ratio, method=pruner, identity=job.identity("float32"))
    return TokenCache(folder)


def late_of(folder: Path, method: str, ratio: float) -> LatePruning:
    """A method as jobs.generate prunes the cache in the folder by it."""
    question = [{"question_id": 1, "video_id": "a", "prompt": "p"}]
    return request_about(folder / "c", question, pruner=method, retention_ratio=ratio).prunings[""]


@pytest.mark.parametrize(
    ("method", "ratio"), [("gstep", 0.25), ("fps", 0.1), ("uniform", 0.25), ("vidcom2", 0.25), ("random", 0.25)]
)
def test_a_page_shows_what_a_cache_of_the_method_would_show(tmp_path, method, ratio):
    whole, made = cache_by(tmp_path / "c", "none"), cache_by(tmp_path / method, method, ratio)
    late, held, pictures = late_of(tmp_path, method, ratio), whole.get("a"), Pictures([], "there are none")
    chosen, same = (
        chosen_video(held, late.select(held.visual, "cpu")),
        made.get("a", None, "selection"),
    )
    assert chosen.index.tolist() == same.index.tolist() and chosen.metadata["n_tokens"] == len(same.index)
    assert chosen.metadata["kept_per_frame"] == same.metadata["kept_per_frame"]
    page = draw_page(replace(chosen, metadata=_timeless(chosen)), described(whole.identity, late), pictures)
    assert page.html == draw_page(replace(same, metadata=_timeless(same)), made.identity, pictures).html


@pytest.mark.parametrize(
    "method",
    [
        "gstep",
        "uniform",
        "random",
    ],
)
def test_a_page_is_described_as_a_cache_of_the_method_would_be(tmp_path, method):
    whole, made = cache_by(tmp_path / "c", "none"), cache_by(tmp_path / method, method, 0.25)
    assert described(whole.identity, late_of(tmp_path, method, 0.25)) == made.identity


def _timeless(video):
    """Its row without where and when it was written."""
    written = ("token_shard", "first_row_group", "row_counts", "footer_hash", "checksum", "write_s")
    return {**video.metadata, **dict.fromkeys(written)}


@pytest.fixture
def asked(tmp_path):
    """A checked request to ask a question about each of two cached videos."""
    cache_by(tmp_path / "c", "none")
    rows = [{"question_id": name, "video_id": name, "prompt": "What?", "answer": "x"} for name in ("a", "b", "gone")]
    file = write_questions(tmp_path / "q.jsonl", rows)

    def request(*methods, **options) -> EvaluateRequest:
        places = {"benchmark": str(file), "cache": str(tmp_path / "c"), "out": str(tmp_path / "r")}
        given = {**places, "method": [*methods], "retention_ratio": [0.1, 0.25], **options}
        found = prepare(EvaluateConfig(**given), QUIET)
        found.store.make()
        return found

    return request


DISPUTED = scores(("a", "a", "101"), ("b", "b", "111"))


def pages_of(request, table=DISPUTED):
    return video_pages(request, table, [*arms_of(request).values(), FPS], Console(quiet=True))


def test_a_method_that_looks_at_the_video_alone_has_a_page_at_its_largest_ratio(asked):
    request = asked("gstep", "uniform", "fastv,K=1")
    links = pages_of(request)
    gstep, uniform = (page_name("a", LateAsked(name, 0.25)) for name in ("gstep", "uniform"))
    assert links == {"a": [("gstep", gstep), ("uniform", uniform)]}
    assert sorted(request.store.names("pages", ".html")) == sorted([gstep, uniform])
    page = request.store.read(gstep).decode()
    assert "retention ratio 0.25" in page and "gstep" in page


@pytest.mark.parametrize("positions", ["original", "both"])
def test_a_method_has_one_page_at_whatever_positions_it_is_asked(asked, positions):
    request, gstep = asked("gstep", positions=positions), page_name("a", LateAsked("gstep", 0.25))
    assert pages_of(request, scores(("a", "a", "110"))) == {"a": [("gstep", gstep)]}
    assert request.store.names("pages", ".html") == [gstep]


def test_pages_that_are_there_stay_as_they_are(asked):
    request = asked("gstep", "uniform")
    links = pages_of(request)
    (_, gstep), (_, uniform) = links["a"]
    request.store.put(gstep, b"mine")
    request.store.delete(uniform)
    assert pages_of(request) == links
    assert request.store.read(gstep) == b"mine" and request.store.exists(uniform)


def test_once_the_tokens_are_gone_pages_are_linked_and_no_new_ones_come(asked):
    request, more = asked("gstep"), asked("gstep", "uniform")
    links = pages_of(request)
    LocalStore(request.cache).delete("cache.json")
    assert pages_of(more) == links != {}


def test_a_video_that_is_not_in_the_cache_costs_its_link_alone(asked):
    disputed = scores(("gone", "gone", "101"), ("a", "a", "101"))
    assert list(pages_of(asked("gstep"), disputed)) == ["a"]


def test_where_no_pages_are_wanted_none_are_drawn(asked):
    request = asked("gstep", pages=0)
    assert pages_of(request) == {} and not request.store.names("pages", ".html")
    assert pages_of(asked("gstep"), scores(("a", "a", "111"))) == {}


@dataclass(frozen=True, kw_only=True)
class Broken(Pruner):
    """A method that selects nothing."""

    name: ClassVar[str] = "broken"
    nested: ClassVar[bool] = False

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        raise RuntimeError("a bug of the method")


def test_a_method_that_fails_on_a_page_costs_the_page_alone(asked):
    request = asked("gstep", f"{__name__}:Broken")
    said = io.StringIO()
    links = video_pages(request, DISPUTED, list(arms_of(request).values()), Console(file=said, width=300))
    assert [label for label, _ in links["a"]] == ["gstep"]
    assert "note: no page of a: RuntimeError('a bug of the method')" in said.getvalue()
