"""Videos as files: the same bytes every time, and every rendered frame comes back once."""

import io

import av
import numpy as np
import pytest

from pipeline.evaluate.shapes.layout import read_mp4, write_mp4, write_picture
from pipeline.evaluate.shapes.render import render
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import ROUND_EVEN, Sampling
from tests.pipeline.evaluate.shapes.shape_videos import through_h264, videos
from tests.pipeline.videos import KeepSize


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("decoder", ["auto", "pyav"])
def test_every_way_of_sampling_takes_each_rendered_frame_once(tmp_path, length, decoder):
    video = videos(3)[length]
    count, path = video.n_frames, tmp_path / "v.mp4"
    write_mp4(path, render(video))
    for sampling in (
        Sampling(num_frames=None, fps=1, max_frames=32),
        Sampling(num_frames=count),
        Sampling(num_frames=32, rule=ROUND_EVEN),
    ):
        decoded = decode_video(DecodeRequest(path, sampling, KeepSize(), decoder=decoder))
        assert decoded.frame_indices.tolist() == list(range(count)) == decoded.timestamps.tolist()
        assert (decoded.fps, decoded.duration_s, decoded.codec, decoded.n_repeated) == (1.0, float(count), "h264", 0)
        assert abs(decoded.frames.astype(int) - read_mp4(path)).max() <= 2


def test_frames_come_back_nearly_as_they_were():
    for video in videos(3):
        frames = render(video)
        back = through_h264(frames)
        assert back.shape == frames.shape
        assert 0 < abs(back.astype(int) - frames).mean() < 4


def test_a_file_has_the_same_bytes_every_time(tmp_path):
    first, again, other = io.BytesIO(), tmp_path / "again.mp4", io.BytesIO()
    one, two = (render(video) for video in (videos(3)[1], videos(6)[4]))
    write_mp4(first, one)
    write_mp4(again, one)
    write_mp4(other, two)
    assert first.getvalue() == again.read_bytes() != other.getvalue()


def test_the_stream_is_what_most_videos_are(tmp_path):
    write_mp4(tmp_path / "v.mp4", render(videos(1)[0]))
    with av.open(str(tmp_path / "v.mp4")) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, float(stream.average_rate)) == ("h264", "yuv420p", 1.0)
        assert (stream.width, stream.height, stream.frames) == (96, 96, 8)


def test_a_picture_has_every_frame_in_its_place(tmp_path):
    short, long = (np.full((count, 4, 6, 3), 200, np.uint8) for count in (2, 5))
    short[1] = 90
    write_picture(tmp_path / "p.png", [short, long], columns=3, scale=2)
    with av.open(str(tmp_path / "p.png")) as file:
        (picture,) = (frame.to_ndarray(format="rgb24") for frame in file.decode(video=0))
    assert picture.shape == (2 * (4 + 4 + 8), 2 * 18, 3)
    assert picture[4, 4].tolist() == [200] * 3 and picture[4, 16].tolist() == [90] * 3
    assert picture[4, 28].tolist() == [0] * 3 and picture[12, 4].tolist() == [255] * 3
    assert picture[28, 16].tolist() == [200] * 3 and picture[28, 28].tolist() == [0] * 3
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
