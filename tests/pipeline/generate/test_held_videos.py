"""Cached videos for prompts: each is read once, and the last few stay in memory."""

from pipeline import TokenCache
from pipeline.generate.held_videos import HeldVideos, n_bytes
from tests.pipeline.asking import tiny_cache


def test_a_video_is_read_once_and_few_are_held(tmp_path):
    cache = tiny_cache(tmp_path / "c", ("a", "b", "c"))
    opened = TokenCache(str(cache), store=cache)
    size = n_bytes(opened.get("a").visual)
    held = HeldVideos(opened, None, limit=2 * size)
    a, ratio, seconds, warnings = held.get("a")
    assert (ratio, warnings) == (0.25, 0) and seconds > 0
    assert held.get("a")[0] is a and held.get("a")[2] == 0
    held.get("b")
    assert held.get("a")[0] is a  # both fit
    held.get("c")
    assert held.get("a")[0] is a and held.get("b")[2] > 0  # the one that was not asked for longest had to go
    small = HeldVideos(opened, None, limit=size)
    first = small.get("a")[0]
    small.get("b")
    assert small.get("a")[0] is not first  # it had to go
