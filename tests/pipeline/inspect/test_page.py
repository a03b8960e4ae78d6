"""One video on a page of its own, and what the terminal shows of a cache, of one video, and of answers."""

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from gstep.types import budget_for
from pipeline import TokenCache
from pipeline.errors import RatioNotCached, UnknownVideo
from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.html_pages import make_environment
from pipeline.inputs.named_videos import Roots
from pipeline.inspect.answers import MAX_SHOWN, Answers, render_answers_report, render_question_report
from pipeline.inspect.page import draw_page, list_tiers, render_video_page, write_page
from pipeline.inspect.report import (
    count_cache,
    format_source_frames,
    list_source_facts,
    list_step_frames,
    render_cache_report,
    render_video_report,
)
from pipeline.inspect.thumbnails import Pictures, Thumbnails, make_source_pictures
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.caches import encoded, make_identity, random_tokens, write_header, write_shard
from tests.builders.clips import write_jpegs
from tests.pipeline import pages
from tests.pipeline.pages import (
    FRAMES,
    HOSTILE,
    PREPROCESSOR,
    SIDE,
    VIDEO,
    Texts,
    build,
    cells,
    data_of,
    pictures_of,
    shown,
)


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


def test_a_source_object_that_is_gone_is_not_one_that_has_changed(decoded, tmp_path, server):
    cache = build(tmp_path / "c", decoded, uri=server.uri("gone.mp4"))
    page = render_video_page(cache, VIDEO, objects=server.objects(), video_roots=[server.uri()])
    assert page.missing.startswith("the source object is not at hand: ")


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


def test_a_cache_is_shown_with_its_identity_its_counts_and_its_videos(cache):
    text = shown(render_cache_report(cache, *count_cache(cache)))
    assert "retention ratio 0.25" in text and f"frames  {FRAMES} frames per video (--num-frames): evenly spread" in text
    assert "1 small file (a commit each) and 0 merged files in videos/" in text
    assert "1 ok, 1 failed" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("bikes"))
    assert VIDEO in row and [cell.strip() for cell in row.split("│")][1:5] == [str(FRAMES), "0.8", "1,568", "392"]


def test_a_video_is_shown_frame_by_frame(cache):
    text = shown(render_video_report(cache, VIDEO))
    row = cache.metadata(VIDEO)
    assert "\n392 of 1,568 tokens kept (25.0%)\n" in text
    assert "sampled  source fps 25, sampled at 0.8 fps, 8 frames " in text and "limit" not in text
    lines = [line.split("│") for line in text.splitlines() if line.count("│") == 5]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [int(line[4]) for line in cells[-FRAMES:]] == row["kept_per_frame"]
    assert [int(line[1]) for line in cells[-FRAMES:]] == row["frame_indices"]
    assert "156 of 1,568 tokens kept (9.9%)" in shown(render_video_report(cache, VIDEO, 0.10))


def test_what_was_carried_stands_with_the_video_and_names_are_no_markup(decoded, tmp_path):
    """Rich would take [red] for a colour, and refuse [/b]. A cache of many videos names the first."""
    carried = {"txt": "A [bike]\nby a \x1b[31mlake", "json": {"id": 7}, "missing": None, "[/b]": "x"}
    name = "[red]a[/b].mp4"
    cache = build(tmp_path / "c", decoded, video_id=name, uri="[red]b[/b].mp4", manifest=json.dumps(carried))
    write_shard(cache.store, "more", *(encoded(f"v{i}", random_tokens(i), 0.25, "gstep") for i in range(22)))
    cache.refresh()
    of_cache = shown(render_cache_report(cache, *count_cache(cache)))
    of_video = " ".join(shown(render_video_report(cache, name)).split())
    assert name in of_cache and "... and 3 more" in of_cache and "[red]b[/b].mp4" in of_video
    assert 'txt A [bike] by a [31mlake json {"id": 7} [/b] x run' in of_video and "missing" not in of_video


def test_a_failed_or_removed_video_is_shown_with_the_reason(decoded, tmp_path):
    cache = build(tmp_path / "c", decoded)
    assert "failed  corrupt in decode: the file is cut off" in shown(render_video_report(cache, "bad.mp4"))
    remove_videos(cache.store, [VIDEO], "asked for", lambda line: None, timedelta(0))
    assert "\nremoved  asked for" in shown(render_video_report(TokenCache(tmp_path / "c"), VIDEO))


def test_what_is_not_cached_is_refused(cache):
    for error, asked in (UnknownVideo, ("nope",)), (RatioNotCached, (VIDEO, 0.5)):
        with pytest.raises(error):
            render_video_report(cache, *asked)


def test_facts_name_the_clip_and_what_was_repeated(cache):
    row = cache.metadata(VIDEO)

    def facts(sampling=None, **more) -> dict[str, str]:
        return dict(list_source_facts({**row, **more}, sampling or {"num_frames": FRAMES}))

    assert not {"clip", "limit", "repeated", "note", "pixels"} & facts().keys()
    assert facts(start_s=None, end_s=2.5)["clip"] == "0 s to 2.5 s"
    assert facts(start_s=1.5, end_s=None)["clip"] == "1.5 s to the end"
    assert facts(n_repeated=3, clip_frames=5)["repeated"] == "3 sampled frames: the clip has only 5 frames"
    assert facts(decode_warnings=2)["decoder"].endswith(", 2 warnings")
    assert facts(color_transfer="smpte2084")["colors"].startswith("transfer function smpte2084, which is HDR: taken as")
    assert facts(color_transfer="bt709")["colors"] == "transfer function bt709"
    assert facts(sample_aspect_ratio="16:15")["pixels"].startswith("16:15 (width to height), not square")
    assert facts(backend_note="frame sizes differ: 2 sizes")["note"] == "frame sizes differ: 2 sizes"
    assert facts(clip_fps=row["fps"] / 2)["sampled"].startswith("source fps 25 on average, sampled at 0.4 fps")
    assert facts(clip_frames=0)["sampled"].startswith("source fps 25, sampled at unknown fps")  # of another program
    assert facts({"fps": 1.0, "max_frames": 8}, frames_by_rate=10)["limit"].startswith(
        "--fps 1 gives 10 frames of this clip, capped at 8"
    )
    assert "limit" not in facts({"fps": 1.0, "max_frames": 8}, frames_by_rate=0)


def test_frames_of_a_pair_stand_together_and_the_last_may_be_alone():
    row = {"frame_indices": [0, 3, 7, 9, 12], "n_frames": 3}
    assert list_step_frames(row) == [[0, 1], [2, 3], [4]]
    shown_frames = [format_source_frames(row, frames) for frames in list_step_frames(row)]
    assert shown_frames == ["frames 0, 3", "frames 7, 9", "frame 12"]
    assert list_step_frames({"frame_indices": [4, 5], "n_frames": 2}) == [[0], [1]]


IDENTITY = {
    "cache": {"pruner": {"method": "gstep"}, "retention_ratio": 0.25},
    "model": {"type": "llava_onevision", "weights": "hub:x@1"},
    "retention_ratio": 0.1,
}
GOOD = {
    "status": "ok", "attempts": 1, "n_visual_tokens": 6, "n_prompt_tokens": 10, "n_new_tokens": 3, "n_total": 60,
    "n_kept": 6, "load_s": 0.5, "prefill_s": 0.5, "decode_s": 0.5, "batch_size": 1, "answer": "this",
}  # fmt: skip
FAILED = {"status": "failed", "attempts": 2, "error_class": "io", "error_message": "it cannot be read"}


def row(question_id: str, values=GOOD, **more):
    return {"question_id": question_id, "video_ids": ["v.mp4"], "prompt": "What?", **values, **more}


def stored(tmp_path, *rows) -> LocalStore:
    store = LocalStore(tmp_path / "answers")
    store.make()
    write_answers_header(store, IDENTITY)
    commit_answers(store, "run", 0, rows)
    return store


def test_counts_failures_and_the_first_questions_are_shown(tmp_path):
    rows = [row(f"q{n:02}", target="[/b]") for n in range(MAX_SHOWN + 2)]
    said = shown(render_answers_report(Answers.open(stored(tmp_path, *rows, row("b", FAILED, target=None)))))
    assert f"{MAX_SHOWN + 2} answered, 1 failed" in said and "hub:x@1" in said and "gstep at 0.25" in said
    assert "failed: io" in said and "it cannot be read" in said and "--retry-failed" in said
    assert "q00" in said and f"q{MAX_SHOWN:02}" not in said and "... and 3 more" in said
    assert next(line for line in said.splitlines() if "q00" in line).split("│")[3:] == [" this       ", " [/b]   "]


def test_the_letter_of_a_choice_is_followed_by_its_text(tmp_path):
    plain = row("q1", answer="B", choices=["red", "yellow"], choice=1)
    lettered = row("q2", answer="A", choices=["A. red", "B. yellow"], choice=0)
    written = row("q3", answer="It is red", choices=["red", "yellow"], choice=0)
    store = stored(tmp_path, plain, lettered, written, row("q4", answer="B"))
    lines = shown(render_answers_report(Answers.open(store))).splitlines()
    answers = {cells[0].strip(): cells[3].strip() for cells in (line.split("│") for line in lines) if len(cells) == 5}
    assert answers == {"q1": "B. yellow", "q2": "A. red", "q3": "It is red", "q4": "B"}
    assert "B. yellow" in shown(render_question_report(Answers.open(store, "q1")))


def test_a_question_is_shown_whole_under_each_pruning(tmp_path):
    choices = {"choices": ["a dog", "a cat"], "choice": 1, "choice_scores": [-2.0, float("-inf")]}
    store = stored(
        tmp_path, row("q", pruning="gstep@0.1", **choices), row("q", FAILED, pruning="uniform@0.1"), row("other")
    )
    answers = Answers.open(store, "q")
    said = shown(render_question_report(answers))
    assert "a dog  (log-probability -2.000)" in said and "gstep@0.1" in said and "io: it cannot be read" in said
    assert "6 of 60" in said and "other" not in said
    assert "gstep@0.1" in shown(render_answers_report(Answers.open(store)))


def test_a_conversation_is_shown_turn_by_turn(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Who is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "What?"}]},
    ]
    store = stored(tmp_path, row("q", conversation=json.dumps(turns)))
    lines = [line.split() for line in shown(render_question_report(Answers.open(store, "q"))).splitlines()]
    assert ["user", "(video)", "Who", "is", "it?"] in lines and ["assistant", "A", "dog."] in lines
    assert ["prompt", "What?"] in lines
