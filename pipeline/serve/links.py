"""``cache://VIDEO_ID?retention_ratio=R``: how a message names a cached video."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

SCHEME = "cache://"
_RATIO = "retention_ratio"
_CACHE = "cache"


@dataclass(frozen=True)
class CacheLink:
    """A parsed link: video id, share of its tokens (None: the server's), and cache name ("": the first cache)."""

    video_id: str
    retention_ratio: float | None = None
    cache: str = ""

    @classmethod
    def parse(cls, url: str) -> CacheLink:
        """Read a link, whose id is percent-decoded so that one with a ``?`` or ``%`` can be named.

        Raises ValueError for another scheme, and an unknown, repeated or impossible option.
        """
        if not url.startswith(SCHEME):
            raise ValueError(
                f"{url[:80]!r} is no cached video: this server reads {SCHEME}VIDEO_ID?{_RATIO}=R, no files and no "
                "addresses"
            )
        name, _, query = url.removeprefix(SCHEME).partition("?")
        pairs = parse_qsl(query, keep_blank_values=True)
        asked = dict(pairs)
        if unknown := sorted(asked.keys() - {_RATIO, _CACHE}):
            raise ValueError(f"{url[:200]!r}: unknown option {unknown[0]!r}; known: {_RATIO}, {_CACHE}")
        if len(asked) < len(pairs):
            raise ValueError(f"{url[:200]!r} says an option twice")
        if not name:
            raise ValueError(f"{url[:200]!r} names no video")
        return cls(unquote(name), _ratio(asked[_RATIO]) if _RATIO in asked else None, asked.get(_CACHE, ""))


def _ratio(text: str) -> float:
    """Parse a ratio in (0, 1]. Raises ValueError."""
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"{_RATIO} must be in (0, 1], got {text[:40]!r}")
    return ratio
