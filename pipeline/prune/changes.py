"""The comparison of cached videos' files with their files now, by a few of their bytes.

It is made if a file has its old size and another mark. A copy of the same bytes has other times. Uploaded in parts it
has another ETag. A rebuilt tar has another mark, and most of its members are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from pipeline.inputs.forms import OpenArchives
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import request_threads
from pipeline.video.source import make_no_answer, sample_source

_AT_ONCE = 32  # files and archives that are checked in parallel


def find_replaced(locations: Sequence[Location], samples: Sequence[int], objects: Objects) -> list[bool]:
    """Return a bool per location: True if it has other bytes than its cached video had; False if the file is gone.

    Reads a few bytes of each file, of many files in parallel.

    Args:
        locations: the locations of the videos, with their sizes.
        samples: the ``sample_key`` of each cached video's file.

    Raises UsageError where the store does not answer.
    """
    groups = defaultdict[str, list[int]](list)  # file or archive -> indices of its locations
    for number, location in enumerate(locations):
        groups[location.file].append(number)
    is_replaced = [False] * len(locations)
    with request_threads(min(_AT_ONCE, len(groups) or 1)) as pool:
        compare = partial(_compare_group, locations, samples, objects)
        for numbers, answers in zip(groups.values(), pool.map(compare, groups.values()), strict=True):
            for number, answer in zip(numbers, answers, strict=True):
                is_replaced[number] = answer
    return is_replaced


def _compare_group(
    locations: Sequence[Location], samples: Sequence[int], objects: Objects, numbers: Sequence[int]
) -> list[bool]:
    """Return a bool for each of ``numbers``, whose locations have the same file: True if that video is replaced."""
    with OpenArchives(objects) as opened:
        return [_is_replaced(locations[number], samples[number], objects, opened) for number in numbers]


def _is_replaced(location: Location, sample: int, objects: Objects, opened: OpenArchives) -> bool:
    """Return True if a video has another sample than the cached video's file; False if the file is gone.

    An archive's member without a sample counts as replaced. Raises UsageError where the store does not answer.
    """
    if location.member is None:
        return sample_source(location.file, location.size or 0, objects) not in (None, sample)
    try:
        return opened.sample(location) != sample
    except FileNotFoundError:
        return False
    except OSError as error:
        raise make_no_answer(error) from error
