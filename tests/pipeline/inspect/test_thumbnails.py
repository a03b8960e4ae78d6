"""Pictures are those of the very file and frames that were sampled; without them a page says why."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.inputs.named_videos import Roots
from pipeline.inspect.page import render_video_page
from pipeline.inspect.thumbnails import Pictures, Thumbnails, make_source_pictures
from pipeline.prune.decode_stage import make_decoding_columns
from pipeline.storage.s3 import Objects
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import write_jpegs
from tests.pipeline.pages import FRAMES, VIDEO, build, data_of, pictures_of


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
        ({"uri": __file__, "source_size": Path(__file__).stat().st_size}, "decoding failed: unsupported"),
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
