"""The page of one video: the pictures and numbers of the very file, nothing outside, and nothing breaks out of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gstep.types import budget_for
from pipeline import TokenCache
from pipeline.html_pages import make_environment
from pipeline.inputs.named_videos import Roots
from pipeline.inspect.page import draw_page, list_tiers, render_video_page, write_page
from pipeline.inspect.thumbnails import Pictures, Thumbnails, make_source_pictures
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.storage.s3 import Objects
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.caches import encoded, make_identity, random_tokens, write_header, write_shard
from tests.builders.clips import write_jpegs
from tests.pipeline import pages
from tests.pipeline.pages import FRAMES, HOSTILE, PREPROCESSOR, SIDE, VIDEO, Texts, build, cells, data_of, pictures_of


@pytest.fixture(scope="module")
def page(cache, tmp_path_factory) -> Path:
    """The page of the clip, with pictures."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    assert "with pictures of its frames" in write_page(cache, VIDEO, file, video_roots=["/"])
    return file


def test_the_page_carries_the_order_of_selection_and_the_budgets_of_its_tiers(page, cache):
    data = pages.data_of(page.read_text())
    assert data["order"] == cache.get(VIDEO, order="selection").index.tolist()
    kept = {tier["ratio"]: tier["kept"] for tier in data["tiers"]}
    assert kept == {ratio: budget_for(ratio, FRAMES * 196) for ratio in (0.10, 0.15, 0.20, 0.25)}
    assert (data["grid"], data["perFrame"], data["frames"]) == ([SIDE, SIDE], 196, FRAMES)


def test_the_page_says_when_each_frame_was_and_refers_to_nothing_outside(page, decoded):
    html = page.read_text()
    for t, (index, at) in enumerate(zip(decoded[1].frame_indices, decoded[1].timestamps, strict=True)):
        caption = f'<b>t {t}</b><span class="count"></span><small>{at:.2f} s</small><small>frame {index}</small>'
        assert caption in html
    assert "squeezed to 384×384" in html and "640×272" in html
    assert pages.links_of(html) and all(link.startswith(("data:image/jpeg;", "#t")) for link in pages.links_of(html))
    assert "http://" not in html and "https://" not in html and "default-src 'none'" in html


@pytest.mark.parametrize(
    ("weights", "shown"),
    [(f"shapes:{'0f' * 16}", f"shapes:{'0f' * 6}"), ("tiny:2-db6a753de601", "tiny:2-db6a753de601")],
)
def test_the_first_lines_name_the_method_and_the_model_with_a_long_hash_cut(cache, weights, shown):
    identity = {**cache.identity, "model": {"type": "llava", "weights": weights}}
    html = draw_page(cache.get(VIDEO, order="selection"), identity, Pictures([], "none")).html
    assert f"<b>llava, {shown}</b>, pruned with <b>gstep</b>" in html and f"llava  {weights}" in html


def test_no_text_breaks_out_of_its_place(decoded, tmp_path):
    """As the video's id, in its path, its codec, a caption of a tar and the reason without pictures."""
    place = dict.fromkeys(("video_id", "codec", "run_id"), HOSTILE)
    carried = json.dumps({"txt": HOSTILE, "json": {"id": 7}})
    cache = build(tmp_path / "c", decoded, uri=f"gone/{HOSTILE}", manifest=carried, **place)
    html = render_video_page(cache, HOSTILE).html
    page = Texts(html)
    assert page.scripts == 2 and html.count("<script") == 2
    assert page.texts.count(HOSTILE) >= 3  # the heading, a fact and a caption
    assert f"gone/{HOSTILE}" in page.texts and '{"id": 7}' in page.texts
    assert len(pages.data_of(html)["order"]) == cache.metadata(HOSTILE)["n_tokens"]
    script = '<script type="application/json" id="data">{{ data|tojson }}</script>'
    html = make_environment("pipeline").from_string(script).render(data={"text": HOSTILE})
    assert html.count("<") == 2 and "\u2028" not in html and pages.data_of(html) == {"text": HOSTILE}


def test_the_page_starts_at_the_ratio_asked_for(cache):
    assert 'value="0"' in render_video_page(cache, VIDEO, 0.10).html
    html = render_video_page(cache, VIDEO, 0.12).html
    assert [tier["ratio"] for tier in pages.data_of(html)["tiers"]] == [0.10, 0.12, 0.15, 0.20, 0.25]
    assert 'value="1"' in html


def test_a_method_without_an_order_has_one_tier_and_no_slider_and_tokens_without_a_grid_are_counted(decoded, tmp_path):
    cache = build(tmp_path / "c", decoded, 0.2, "uniform", uri="gone", tokens_per_frame=45)
    html = render_video_page(cache, VIDEO).html
    assert 'type="range"' not in html and "no temporal density" in html
    assert [tier["ratio"] for tier in pages.data_of(html)["tiers"]] == [0.2]
    assert pages.data_of(html)["grid"] is None and "no square grid" in html


def test_temporal_patches_are_drawn_by_their_grid_over_their_first_frames(decoded, tmp_path):
    """As Qwen has them: 7 frames in 4 patches of 5 x 9 tokens, the last frame alone."""
    video = decode_video(DecodeRequest(decoded[0], Sampling(7), PREPROCESSOR))
    store = write_header(tmp_path / "c", identity=make_identity(sampling={"num_frames": 7}))
    columns = {**make_decoding_columns(video, 1), "uri": str(decoded[0]), "model_extra": json.dumps({"grid": [5, 9]})}
    write_shard(store, "run", encoded(VIDEO, random_tokens(0, (4, 45, 16)), 0.25, "gstep", **columns))
    html = render_video_page(TokenCache(tmp_path / "c"), VIDEO, video_roots=["/"]).html
    assert pages.data_of(html)["grid"] == [5, 9] and pages.data_of(html)["frames"] == 4
    assert html.count('viewBox="0 0 9 5"') == 4
    shown = decode_video(DecodeRequest(decoded[0], Sampling(7), Thumbnails(224))).frames[::2]
    assert np.abs(np.stack(pages.pictures_of(html)).astype(int) - shown).mean() < 4
    f, at = video.frame_indices, video.timestamps
    for t, frames in enumerate([f"frames {f[0]}, {f[1]}", f"frames {f[2]}, {f[3]}", f"frames {f[4]}, {f[5]}"]):
        assert f"<small>{at[2 * t]:.2f} s</small><small>{frames}</small>" in html
    assert f"<small>{at[6]:.2f} s</small><small>frame {f[6]}</small>" in html
    assert "45\N{NO-BREAK SPACE}tokens\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}4\N{NO-BREAK SPACE}pairs" in html
    assert "the first is shown" in html


def test_tiers_end_at_what_is_stored():
    row = {"retention_ratio": 0.3, "nested": True, "n_total": 100, "n_tokens": 30}
    assert list_tiers(row) == [(0.10, 10), (0.15, 15), (0.20, 20), (0.25, 25), (0.3, 30)]
    assert list_tiers({**row, "retention_ratio": 0.05, "n_tokens": 5}) == [(0.05, 5)]
    assert list_tiers({**row, "nested": False}, 0.1) == [(0.3, 30)]


@pytest.mark.slow
def test_the_slider_lights_the_tokens_of_each_tier(browser, page, cache):
    """Driven by the keyboard from the largest tier to the smallest: tokens, counts, bars and words follow."""
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415 - skipped where it is not installed

    browser.get(page.as_uri())
    slider = browser.find_element("css selector", "input[type=range]")
    assert slider.accessible_name == "Retention ratio"
    stored = cache.get(VIDEO, order="selection").index
    for ratio in (0.25, 0.20, 0.15, 0.10):
        kept = stored[: budget_for(ratio, FRAMES * 196)]
        counts = torch.bincount(kept // 196, minlength=FRAMES).tolist()
        assert browser.execute_script("return window.state") == {"ratio": ratio, "kept": len(kept), "counts": counts}
        assert slider.get_attribute("aria-valuetext") == f"{100 * ratio:g} %, {len(kept)} tokens"
        assert browser.find_element("id", "ratio").text == f"{100 * ratio:g} %"
        assert browser.find_element("id", "kept").text == str(len(kept))
        captions = [caption.text for caption in browser.find_elements("class name", "count")]
        assert captions == [f"{count} / 196" for count in counts]
        for t, tile in enumerate(browser.find_elements("class name", "tile")):
            mask = torch.bincount(kept[kept // 196 == t] % 196, minlength=196).reshape(SIDE, SIDE)
            assert tile.get_attribute("data-lit") == str(counts[t])
            veil = tile.find_element("class name", "veil").get_attribute("d")
            assert cells(veil.removeprefix("M0 0H14V14H0z")) == pages.places_of(mask.numpy())
            assert tile.get_attribute("aria-label").endswith(f"{counts[t]} of 196 tokens kept")
        heights = [float(bar.get_attribute("height")) for bar in browser.find_elements("class name", "bar")]
        assert np.allclose(np.array(heights) * max(counts), np.array(counts) * max(heights))
        slider.send_keys(Keys.ARROW_LEFT)
    assert browser.get_log("browser") == []  # neither an error nor anything that the page's policy stopped
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert all(name.startswith("data:") for name in loaded)


@pytest.mark.slow
def test_tokens_are_lit_where_they_lie(browser, decoded, tmp_path):
    """Read off the screen: tiles without pictures are bright at the kept tokens and nowhere else."""
    cache = build(tmp_path / "c", decoded, uri="gone")
    file = tmp_path / "page.html"
    file.write_text(render_video_page(cache, VIDEO).html)
    browser.get(file.as_uri())
    index = cache.get(VIDEO).index
    for t, tile in enumerate(browser.find_elements("class name", "tile")):
        # A screenshot ends at the window.
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", tile)
        bright = pages.middles_of(pages.image(tile.screenshot_as_png))[..., 0].reshape(-1) > 180
        assert np.flatnonzero(bright).tolist() == (index[index // 196 == t] % 196).tolist()


def test_the_page_shows_the_sampled_frames_of_the_source(cache, decoded):
    html = render_video_page(cache, VIDEO, video_roots=["/"]).html
    pictures = np.stack(pictures_of(html))
    assert pictures.shape == (FRAMES, 95, 224, 3)
    small = decode_video(DecodeRequest(decoded[0], Sampling(FRAMES), Thumbnails(224))).frames
    assert np.abs(pictures.astype(int) - small).mean() < 4
    assert len(html) < 100_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"uri": "/no/such/<b>folder</b>/bikes.mp4"}, "the source file is not at hand"),
        ({"uri": "https://host/bikes.mp4"}, "for this one --video-root https://host"),
        ({"source_size": 7}, "has changed since: it has"),
        ({"source_hash": "blake2b:00"}, "has changed since: its hash is another one"),
        ({"source_hash": None}, "does not say which file was read"),
        ({"start_s": 5.0}, "gives other frames than those that were sampled"),
        ({"end_s": -1.0}, "decoding failed: unsupported: the clip"),
        ({"sampling": {}}, "does not say how frames were sampled"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_without_pictures_the_page_says_why_and_still_shows_the_tokens(decoded, tmp_path, change, reason):
    cache = build(tmp_path / "c", decoded, **change)
    page = render_video_page(cache, VIDEO, video_roots=["/"])
    assert reason in page.missing and f"No pictures: {page.missing}." in page.html
    assert not pictures_of(page.html) and page.html.count('class="blank"') == FRAMES
    assert len(data_of(page.html)["order"]) == cache.metadata(VIDEO)["n_tokens"]
    assert "<b>folder" not in page.html


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(272, 640, (95, 224)), (640, 272, (288, 122)), (100, 50, (100, 50)), (1, 4000, (1, 224))],
)
def test_thumbnails_fit_their_box_and_are_never_enlarged(height, width, size):
    assert Thumbnails(224).target_size(8, height, width) == size


def test_pictures_of_a_folder_of_frames_are_found_again_while_it_is_the_same(tmp_path):
    folder, clip = write_jpegs(tmp_path / "frames_fps3" / "x", 12), {"start_s": 1.0, "end_s": 3.0}
    video = decode_video(DecodeRequest(folder, Sampling(4), Thumbnails(64), **clip))
    row = {"uri": str(folder), **clip, **make_decoding_columns(video, 1), "source_offset": None}
    by_time = {"fps": 2.0, "max_frames": 32, "min_frames": 4, "min_rule": "rounded", "time_rule": 2}

    def pictures(sampling, **more) -> Pictures:
        return make_source_pictures({**row, **more}, sampling, Objects(), Roots([tmp_path]))

    assert len(pictures(by_time, frame_indices=[2, 3, 5, 6, 8]).jpegs) == 5
    assert len(pictures({"num_frames": 4}).jpegs) == 4 and not pictures({"num_frames": 4}).missing
    (folder / "00012.jpg").unlink()
    assert "has changed since: it has" in pictures({"num_frames": 4}).missing
