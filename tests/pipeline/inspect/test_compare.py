"""Several methods on one video: each selection is the one that a run would cache; and their page, in a real browser."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gstep
import pipeline
from gstep.backbones import Backbone, ModelSource, family_of
from gstep.methods import VIDEO_METHODS
from gstep.pruners.random import Random
from pipeline import Comparison
from pipeline.errors import UsageError, VideoFault
from pipeline.inspect.comparison_page import draw_cells, draw_edges
from pipeline.inspect.selecting import list_requested_selections
from pipeline.inspect.thumbnails import Pictures
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.caches import encode_clip
from tests.builders.clips import sample, write_clip
from tests.builders.runs import forbid_ray
from tests.pipeline import pages
from tests.pipeline.pages import HOSTILE, PREPROCESSOR, Texts, cells

CLIP = sample("bikes.mp4")
FRAMES = {"num_frames": 3, "device": "cpu", "dtype": "float32"}
RATIOS = (0.25, 0.10)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    forbid_ray(monkeypatch)


@pytest.fixture
def encodings(monkeypatch) -> list[int]:
    """The number of frames of each video that is encoded."""
    calls, encode = [], Backbone.encode

    def counted(self, frames, *arguments):
        calls.append(len(frames))
        return encode(self, frames, *arguments)

    monkeypatch.setattr(Backbone, "encode", counted)
    return calls


def resolved(model: str) -> ModelSource:
    source = ModelSource.resolve(model)
    return family_of(source).with_pooling_head("tiny") if model == "tiny" else source


def methods_of(model: str) -> list[str]:
    """The methods whose evidence a model's encoder gives."""
    family = family_of(resolved(model))
    variants = {name: list_requested_selections([name], [0.25], 0, family.variant)[0].pruner for name in VIDEO_METHODS}
    return [name for name, pruner in variants.items() if set(pruner.sources.items()) <= family.gives]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny-internvl", "tiny-qwen3-vl"])
def test_each_selection_is_the_one_that_a_run_caches_and_the_video_is_encoded_once(model, encodings):
    methods = methods_of(model)
    siglip = {"siglip": "tiny"} if model == "tiny" else {}
    found = pipeline.compare(CLIP, methods=methods, retention_ratios=RATIOS, model=model, **FRAMES, **siglip)
    assert encodings == [3]
    assert len(methods) == {"tiny": 17, "tiny-internvl": 11}.get(model, 14)
    assert [method for method, ratio in found.selections if ratio == 0.10] == [m for m in methods if m != "none"]
    for (method, ratio), selection in found.selections.items():
        if method in ("random", "gstep") or (len(method) % 2) == (ratio == 0.10):  # half of them: each is encoded here
            params = {name: value for name, value in selection.settings.items() if name != "seed"}  # it is 0 in both
            kept = encode_clip(resolved(model), CLIP, 3, method, ratio, **params)[1].kept
            order = np.argsort(kept.index)
            assert selection.index.tolist() == kept.index[order].tolist(), (method, ratio)
            assert (selection.merged is None) == (kept.merged is None)
            assert selection.merged is None or selection.merged.tolist() == kept.merged[order].tolist()


def test_methods_come_by_ratio_with_their_parameters_and_seeds_and_equal_ones_once():
    methods = ["gstep", "gstep,alpha=0.9", "random,seed=0..1", Random(), "none", "gstep"]
    found = pipeline.compare(CLIP, methods=methods, retention_ratios=[0.10, 0.25], seed=4, **FRAMES)
    names = ["gstep", "gstep,alpha=0.9", "random,seed=0", "random,seed=1", "random"]
    assert list(found.selections) == [("none", 1.0), *((name, ratio) for ratio in RATIOS for name in names)]
    assert found.retention_ratios == [1.0, *RATIOS]
    at = {name: found.selections[name, 0.25] for name in names}
    assert at["gstep,alpha=0.9"].settings["alpha"] == 0.9 and at["gstep"].settings["alpha"] == 0.5
    assert [at[name].settings["seed"] for name in names[2:]] == [0, 1, 4]
    assert len({tuple(selection.index.tolist()) for selection in at.values()}) == 5
    assert pipeline.compare(CLIP, methods="random", seed=1, **FRAMES).rows[0].method == "random,seed=1"
    own = list_requested_selections([gstep.make_pruner("gstep", alpha=0.9)], RATIOS, 0, "llava")
    assert [row.label for row in own] == ["gstep,alpha=0.9"] * 2
    assert repr(found).startswith("Comparison('bikes.mp4': none at 100 %, gstep at 25 %, ")


def test_shares_in_common_are_those_of_the_sets_of_tokens():
    found = pipeline.compare(CLIP, methods=["gstep", "vidcom2", "evs"], retention_ratios=RATIOS, **FRAMES)
    for ratio in RATIOS:
        rows = found.at(ratio)
        sets = [set(row.index.tolist()) for row in rows]
        expected = [[len(a & b) / len(a) for b in sets] for a in sets]
        assert found.overlap(ratio).tolist() == pytest.approx(np.array(expected))
        for row in rows:
            counts = torch.bincount(row.index // 196, minlength=3)
            assert row.kept_per_frame == counts.tolist() == row.mask().sum(axis=1).tolist()
            assert row.kept_ratio == len(row.index) / (3 * 196)
    record = found.as_record()
    assert record["n_total"] == 3 * 196 and record["grid"] == [14, 14]
    assert [entry["n_kept"] for entry in record["selections"]] == [len(row.index) for row in found.rows]
    assert record["in_common"][0]["shares"][0][0] == 1.0


def test_a_clip_has_its_own_frames_and_a_file_its_name():
    found = pipeline.compare(CLIP, "a name", start_s=1.0, end_s=2.0, **FRAMES)
    assert found.video_id == "a name" and list(found.selections) == [("gstep", 0.25)]
    assert found.metadata["timestamps"][0] == 1.0 and found.metadata["timestamps"][-1] < 2.0
    assert found.metadata["start_s"] == 1.0


def test_a_video_on_s3_is_one_get(server, monkeypatch):
    """Nothing looks for a cache below the name of a video: a bucket that lets nobody list it would refuse that."""
    server.reach(monkeypatch)
    found = pipeline.compare(server.upload("a/bikes.mp4", CLIP.read_bytes()), **FRAMES)
    assert server.counts() == {"GET": 1}
    assert torch.equal(found.rows[0].index, pipeline.compare(CLIP, **FRAMES).rows[0].index)
    assert found.video_id == "bikes.mp4" and len(found.pictures.jpegs) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": ["gstep", "fastv"]}, "anew for every question.*leave it out"),
        ({"methods": ["gstp"]}, r"unknown method 'gstp' \(did you mean gstep\?\)"),
        ({"methods": ["gstep,positions=original"]}, "--method gstep,positions=original: positions are of prompts"),
        ({"methods": ["ottvid"], "model": "tiny-qwen3-vl"}, "--method ottvid: the encoder of qwen3_vl does not give"),
        ({"methods": ["vidcom2", "fastvid"]}, "--method fastvid: .*name it with --siglip"),
        ({"methods": ["visionzip"], "siglip": "tiny"}, "none of the methods takes anything from a SigLIP checkpoint"),
        ({"retention_ratios": [25.0]}, r"--retention-ratio must be in \(0, 1\], got 25.0; did you mean 25%\?"),
        ({"num_frame": 8}, r"did you mean num_frames\?"),
        ({"pruner": "gstep"}, r"compare\(\) takes no pruner"),
        ({"video_roots": ["/"]}, "is not a cache: --video-root applies only to"),
        ({"model": "/gone"}, "gone"),
    ],
)
def test_what_makes_no_sense_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        pipeline.compare(CLIP, **options)


def test_a_video_that_cannot_be_read_and_a_method_that_cannot_prune_it_say_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.mp4").write_text("this is no video\n" * 50)
    for name, fault in (("gone.mp4", "io"), ("text.mp4", "unsupported")):
        with pytest.raises(VideoFault) as caught:
            pipeline.compare(name, **FRAMES)
        assert caught.value.fault_class == fault and name in str(caught.value)
    (tmp_path / "own_limit.py").write_text(
        "from dataclasses import dataclass\nfrom gstep.pruners.gstep import GSTEP\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(GSTEP):\n    limit: int = 2\n\n"
        "    def select(self, visual, *arguments):\n        if len(visual.tokens) > self.limit:\n"
        "            raise KeyError('too long')\n        return super().select(visual, *arguments)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = pipeline.compare(CLIP, methods=["gstep", "own_limit:Mine,limit=3"], **FRAMES)
    assert torch.equal(*(row.index for row in found.rows))
    with pytest.raises(VideoFault, match=r"own_limit:Mine: .*own_limit.py:11: KeyError: 'too long'") as caught:
        pipeline.compare(CLIP, methods=["gstep", "own_limit:Mine"], **FRAMES)
    assert caught.value.fault_class == "own-code"


def test_a_selection_of_no_tokens_in_a_frame_counts_as_zero():
    row = pipeline.MethodSelection("m", 0.1, torch.tensor([5, 7]), torch.tensor([False, True]), 12, 4)
    assert row.kept_per_frame == [0, 2, 0] and row.per_frame_label == "0 to 2" and row.n_merged == 1
    assert row.mask(merged=True).ravel().nonzero()[0].tolist() == [7]
    assert replace(row, index=torch.tensor([0, 4, 8])).per_frame_label == "1"


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """Three methods, one of which merges, on nine frames of a real clip in two bands."""
    methods = ["gstep", "visionzip", "random"]
    return pipeline.compare(CLIP, methods=methods, retention_ratios=RATIOS, num_frames=9, device="cpu")


@pytest.fixture(scope="module")
def html(comparison) -> str:
    return comparison.to_html()


def tiles_of(html: str) -> list[tuple[str, str, str]]:
    """The label and the paths of the holes and of the merged cells of each tile of a selection."""
    found = re.findall(r'aria-label="([^"]* tokens)">(.*?)</svg>', html)
    return [
        (label, *((re.findall(rf'<path class="{name}" d="([^"]*)"', body) or [""])[0] for name in ("veil", "merged")))
        for label, body in found
    ]


def test_each_row_lights_the_kept_tokens_and_marks_those_that_are_mixtures(comparison, html):
    tiles = iter(tiles_of(html))
    for start, end in ((0, 5), (5, 9)):
        for row in comparison.rows:
            for t in range(start, end):
                label, veil, merged = next(tiles)
                kept, mixed = (pages.places_of(row.mask(merged=m)[t].reshape(14, 14)) for m in (0, 1))
                assert cells(veil.removeprefix("M0 0H14V14H0z")) == kept and cells(merged) == mixed
                assert label == f"{row.method} at {row.ratio_label}, frame {t}: {len(kept)} of 196 tokens"
    assert next(tiles, None) is None
    assert sum(row.n_merged for row in comparison.rows) > 0 and "merged: kept as a mixture of several tokens" in html


def test_the_page_has_each_frame_once_and_refers_to_nothing_outside(comparison, html):
    pictures = pages.pictures_of(html)
    decoded = decode_video(DecodeRequest(sample("bikes.mp4"), Sampling(9), PREPROCESSOR)).frames
    assert [picture.shape for picture in pictures] == [(95, 224, 3)] * 9
    for picture, frame in zip(pictures, decoded, strict=True):
        assert abs(picture.astype(float).mean() - frame.mean()) < 3
    assert pages.links_of(html) and all(
        link.startswith(("data:image/jpeg;", "#f", "#c")) for link in pages.links_of(html)
    )
    assert html.count('<use href="#f8"/>') == 1 + len(comparison.rows)
    assert "<script" not in html and "default-src 'none'" in html and "http" not in html.replace("http-equiv", "")


def test_the_page_says_ratio_share_and_number_of_tokens_of_each_row_and_the_shares_in_common(comparison, html):
    texts = " ".join(" ".join(Texts(html).texts).split())
    for row in comparison.rows:
        kept = f"{row.method} {row.ratio_label} {len(row.index):,} of 1,764 tokens, {100 * row.kept_ratio:.1f} %"
        assert texts.count(kept) == 2  # bands
    for ratio in (0.25, 0.10):
        shares = comparison.overlap(ratio)
        a, b, c = (f"{100 * share:.1f} %" for share in (shares[0, 1], shares[0, 2], shares[1, 2]))
        n = len(comparison.at(ratio)[0].index)
        assert f"gstep visionzip random gstep {n} {a} {b} visionzip" in texts and c in texts
    assert "frames 0 to 4 of 9" in texts and "frames 5 to 8 of 9" in texts and "9.96 s" in texts
    assert "squeezed to 384×384" in texts and "alpha=0.5" in texts and "seed=0" in texts


def test_the_bars_of_a_row_are_its_tokens_of_each_frame_on_the_scale_of_its_ratio(comparison, html):
    for number, row in enumerate(comparison.rows):
        highest = max(max(other.kept_per_frame) for other in comparison.at(row.retention_ratio))
        (path,) = re.findall(rf'<path id="c{number}" d="([^"]*)"', html)
        bars = {int(t): float(height) for t, height in re.findall(r"M(\d+)\.1 100v-([\d.]+)h", path)}
        expected = {t: 100 * count / highest for t, count in enumerate(row.kept_per_frame) if count}
        assert bars == pytest.approx(expected, rel=1e-3)
        assert html.count(f'href="#c{number}"') == 2  # bands, each with its own frames in front
        front = re.findall(rf'href="#c{number}"/><path class="bar" d="([^"]*)"', html)
        assert "".join(front) == path and front[0].count("M") <= 5


def test_pairs_of_frames_show_the_first_and_say_so():
    found = pipeline.compare(sample("bikes.mp4"), methods=["gstep"], model="tiny-qwen3-vl", num_frames=7, device="cpu")
    html = found.to_html()
    assert "A token spans two frames, of which the first is shown." in html and "pairs 0 to 3" in html
    assert len(pages.pictures_of(html)) == 4 and html.count('viewBox="0 0 20 8"') == 2 * 4
    first = [f"{found.metadata['timestamps'][2 * t]:.2f} s</figcaption>" for t in range(4)]
    assert all(caption in html for caption in first)


def test_a_tall_video_has_tall_frames_and_one_row_of_a_page_has_more_of_them(tmp_path):
    tall = write_clip(tmp_path / "tall.mp4", count=12, size=(720, 404))
    found = pipeline.compare(tall, methods=["evs"], model="tiny", num_frames=12, device="cpu")
    html = found.to_html()
    assert "--shape:404/720;--frames:12" in html and html.count('class="band"') == 1
    assert {picture.shape for picture in pages.pictures_of(html)} == {(288, 162, 3)}


def test_without_a_grid_the_page_has_numbers_and_words_and_without_a_source_grids_and_the_reason(comparison):
    html = replace(comparison, grid=None).to_html()
    assert "This model does not say where in a frame its tokens are" in html
    assert html.count('class="tile"') == 9 and not tiles_of(html) and "dropped" not in html  # the frames alone
    assert html.count(f"<figcaption>{comparison.rows[0].kept_per_frame[0]}</figcaption>") >= 1
    html = replace(comparison, pictures=Pictures([], "the source <b>is gone</b>")).to_html()
    assert "No pictures: the source &lt;b&gt;is gone&lt;/b&gt;." in html and not pages.pictures_of(html)
    assert len(tiles_of(html)) == html.count('class="blank"') == 9 * len(comparison.rows)


def test_no_text_breaks_out_of_its_place(comparison):
    selection = replace(comparison.rows[0], method=HOSTILE, settings={"p": HOSTILE})
    found = replace(comparison, video_id=HOSTILE, selections={(HOSTILE, 0.25): selection}, origin=HOSTILE)
    page = Texts(found.to_html())
    assert page.scripts == 0 and page.texts.count(HOSTILE) >= 3
    assert Texts(found._repr_html_()).texts == []  # all of it is an attribute of a frame
    assert "<script" not in found._repr_html_()


def test_a_page_of_nine_frames_and_six_rows_is_small(comparison, tmp_path):
    assert comparison.save(tmp_path / "page.html").endswith("bikes.mp4 with pictures of its frames")
    assert (tmp_path / "page.html").stat().st_size < 250_000
    for place, why in ((tmp_path, "is a folder"), (tmp_path / "nowhere" / "page.html", "nowhere does not exist")):
        with pytest.raises(UsageError, match=why):
            comparison.save(place)


def test_paths_cover_cells_and_their_borders():
    mask = np.random.default_rng(0).random((5, 7)) < 0.4
    assert cells(draw_cells(mask)) == pages.places_of(mask)
    lines = re.findall(r"M(\d+) (\d+)([hv])(\d+)", draw_edges(mask))
    drawn = {(k, int(y) + i * (k == "v"), int(x) + i * (k == "h")) for x, y, k, n in lines for i in range(int(n))}
    padded = np.pad(mask, 1)
    for kind, differ in ("h", np.diff(padded, axis=0)[:, 1:-1]), ("v", np.diff(padded, axis=1)[1:-1]):
        assert {(y, x) for k, y, x in drawn if k == kind} == pages.places_of(differ)


# ---- in a browser


def show(browser: Any, width: int, scheme: str, page: Path) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())


@pytest.fixture
def screen(browser) -> Callable[[Any], NDArray[np.uint8]]:
    """The pixels of an element on the screen."""

    def pixels(element: Any) -> NDArray[np.uint8]:
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        return pages.image(element.screenshot_as_png)

    yield pixels
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_a_browser_shows_a_row_for_each_method_and_ratio_and_nothing_overflows(
    browser, screen, comparison, tmp_path, width, scheme
):
    page = tmp_path / "page.html"
    comparison.save(page)
    show(browser, width, scheme, page)
    assert browser.get_log("browser") == []  # neither an error nor anything that the page's policy stopped
    first = browser.find_element("class name", "band")
    rows = [row for row in first.find_elements("class name", "row") if row.get_attribute("data-method")]
    expected = [(row.method, str(row.retention_ratio)) for row in comparison.rows]
    assert [(row.get_attribute("data-method"), row.get_attribute("data-ratio")) for row in rows] == expected
    assert all(len(row.find_elements("class name", "tile")) == 5 for row in rows)
    root = "document.documentElement"
    inner = browser.execute_script(f"return {root}.clientWidth")  # without the bar that scrolls
    assert width - 20 <= inner <= width and browser.execute_script(f"return {root}.scrollWidth") == inner
    outside = "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll'))"
    right = browser.execute_script(f"return Math.max(...{outside}.map((e) => e.getBoundingClientRect().right))")
    assert right <= inner
    lightness = screen(browser.find_element("tag name", "h1"))[0, 0].mean()
    assert lightness > 200 if scheme == "light" else lightness < 60
    picture = screen(browser.find_element("css selector", ".source .tile"))
    assert picture.std() > 20  # a frame, and not a gap


@pytest.mark.slow
def test_kept_tokens_are_bright_and_dropped_ones_dim_where_they_lie(browser, screen, comparison, tmp_path):
    """Read off the screen, of tiles without pictures: amber where a token was kept, bluish where it is a mixture."""
    page = tmp_path / "page.html"
    replace(comparison, pictures=Pictures([], "none")).save(page)
    show(browser, 1280, "light", page)
    for row in browser.find_elements("class name", "row"):
        key = row.get_attribute("data-method"), float(row.get_attribute("data-ratio") or 0)
        if key == ("visionzip", 0.25):
            tile = row.find_elements("class name", "tile")[2]
            red, green, blue = np.moveaxis(pages.middles_of(screen(tile).astype(int)), -1, 0)
            selection = comparison.selections[key]
            kept, mixed = (selection.mask(merged=m)[2].reshape(14, 14) for m in (False, True))
            assert np.array_equal(np.maximum(red, green) > 150, kept)
            assert np.array_equal((blue > red - 40) & kept, mixed)
            return
    pytest.fail("no row of visionzip")


@pytest.mark.slow
def test_a_notebook_shows_the_page_in_a_frame_of_its_own(browser, comparison, tmp_path):
    page = tmp_path / "notebook.html"
    page.write_text(f"<style>.row {{ display: none }}</style><body>{comparison._repr_html_()}</body>")
    show(browser, 1280, "light", page)
    frame = browser.find_element("tag name", "iframe")
    assert frame.accessible_name == "bikes.mp4: kept tokens"
    browser.switch_to.frame(frame)
    rows = browser.find_elements("css selector", ".row[data-method]")
    assert len(rows) == 2 * len(comparison.rows) and all(row.is_displayed() for row in rows)
    browser.switch_to.default_content()
    assert browser.get_log("browser") == []
