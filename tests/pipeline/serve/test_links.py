"""How a message names a cached video."""

import pytest

from pipeline.serve.links import CacheLink


@pytest.mark.parametrize(
    ("url", "video_id", "ratio"),
    [
        ("cache://bikes.mp4", "bikes.mp4", None),
        ("cache://a/b/c.mp4?retention_ratio=0.1", "a/b/c.mp4", 0.1),
        ("cache:///absolute.mp4?retention_ratio=1", "/absolute.mp4", 1.0),
        ("cache://50%25%20off%3F.mp4", "50% off?.mp4", None),
        ("cache://día.mp4", "día.mp4", None),
        ("cache://../../etc/passwd", "../../etc/passwd", None),  # an id like any other: it is looked up, never opened
    ],
)
def test_a_link_names_a_video_and_a_ratio(url, video_id, ratio):
    assert CacheLink.parse(url) == CacheLink(video_id, ratio)


@pytest.mark.parametrize("video_id", ["a b?c#d%.mp4", "día/ñ.mp4", "x", "/y?retention_ratio=0.5"])
def test_a_link_that_was_written_is_read_again(video_id):
    for ratio, cache in ((None, ""), (0.1, ""), (1.0, "b&c"), (None, "d")):
        link = CacheLink(video_id, ratio, cache)
        assert CacheLink.parse(str(link)) == link


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "no files and no addresses"),
        ("http://example.org/v.mp4", "no cached video"),
        ("data:video/mp4;base64,AAAA", "no cached video"),
        ("CACHE://a", "no cached video"),
        ("cache://", "names no video"),
        ("cache://?retention_ratio=0.1", "names no video"),
        ("cache://a?ratio=0.1", "unknown option 'ratio'"),
        ("cache://a?retention_ratio=", "in \\(0, 1\\]"),
        ("cache://a?retention_ratio=0.1&retention_ratio=0.9", "says an option twice"),
        ("cache://a?retention_ratio=nan", "in \\(0, 1\\]"),
        ("cache://a?retention_ratio=0", "in \\(0, 1\\]"),
        ("cache://a?retention_ratio=1.5", "in \\(0, 1\\]"),
    ],
)
def test_what_is_no_link_says_why(url, why):
    with pytest.raises(ValueError, match=why):
        CacheLink.parse(url)
