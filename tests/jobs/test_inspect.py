"""jobs.inspect: what it refuses, how it fails, and the page that it writes."""

import os
import signal

import pytest

from jobs import inspect
from pipeline import TokenCache
from pipeline.cache.reader import TokenCache as Opened
from tests.pipeline.pages import FRAMES, VIDEO, build, decoded_clip, pictures_of


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> TokenCache:
    return build(tmp_path_factory.mktemp("out") / "cache", decoded_clip(tmp_path_factory.mktemp("videos")))


def test_html_is_written_with_pictures(cache, tmp_path, capsys):
    file = tmp_path / "page.html"
    assert inspect.main([str(cache.store), VIDEO, "--html", str(file)]) == 0
    assert len(pictures_of(file.read_text())) == FRAMES
    assert f"{VIDEO} with pictures of its frames" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("video_id", "file", "message"),
    [
        ("bad.mp4", "page.html", "'bad.mp4' failed: corrupt: the file is cut off"),
        ("nope", "page.html", "'nope' is not in the cache"),
        (VIDEO, "nowhere/page.html", "nowhere does not exist"),
        (VIDEO, ".", "is a folder"),
    ],
)
def test_what_cannot_be_shown_is_refused(cache, tmp_path, capsys, video_id, file, message):
    assert inspect.main([str(cache.store), video_id, "--html", str(tmp_path / file)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_larger_ratio_is_refused(cache, tmp_path, capsys):
    argv = [str(cache.store), VIDEO, "--html", str(tmp_path / "page.html"), "--retention-ratio", "0.5"]
    assert inspect.main(argv) == 2
    assert "0.5 is larger" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flag", [["--html", "page.html"], ["--retention-ratio", "0.1"]], ids=lambda flag: flag[0])
def test_some_flags_go_with_a_video(cache, capsys, flag):
    with pytest.raises(SystemExit) as caught:
        inspect.main([str(cache.store), *flag])
    assert caught.value.code == 2
    assert f"{flag[0]} goes with VIDEO_ID" in capsys.readouterr().err


def test_an_interrupted_look_ends_with_130(cache, capsys, monkeypatch):
    def interrupted(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Opened, "metadata", interrupted)
    assert inspect.main([str(cache.store), VIDEO]) == 130
    assert "interrupted" in capsys.readouterr().err
