"""How a message names a cached video."""

import pytest

from pipeline.serve.links import CacheLink


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("cache://bikes.mp4", CacheLink("bikes.mp4")),
        ("cache://a/b/c.mp4?retention_ratio=0.1", CacheLink("a/b/c.mp4", 0.1)),
        ("cache:///absolute.mp4?retention_ratio=1", CacheLink("/absolute.mp4", 1.0)),
        ("cache://50%25%20off%3F%23.mp4", CacheLink("50% off?#.mp4")),
        ("cache://día.mp4", CacheLink("día.mp4")),
        ("cache:///y%3Fretention_ratio=0.5", CacheLink("/y?retention_ratio=0.5")),
        ("cache://x?cache=d", CacheLink("x", None, "d")),
        ("cache://d%C3%ADa/%C3%B1.mp4?retention_ratio=1&cache=b%26c", CacheLink("día/ñ.mp4", 1.0, "b&c")),
        ("cache://../../etc/passwd", CacheLink("../../etc/passwd")),  # an id like any other: looked up, never opened
    ],
)
def test_a_link_names_a_video_a_ratio_and_a_cache(url, link):
    assert CacheLink.parse(url) == link


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
