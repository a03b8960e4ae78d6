"""The comparison of cached videos' files with their files now, by a few of their bytes.

It is made if a file has its old size and another mark. A copy of the same bytes has other times. Uploaded in parts it
has another ETag. A rebuilt tar has another mark, and most of its members are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from pipeline.inputs.forms import OpenArchives, find_member
from pipeline.rows import ManifestRow
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import request_threads
from pipeline.video.source import make_no_answer, sample_source

_AT_ONCE = 32  # files and archives that are checked in parallel


def find_replaced(rows: Sequence[ManifestRow], samples: Sequence[int], objects: Objects) -> list[bool]:
    """Return a bool a row: True if its file has other bytes than its cached video had; False if the file is gone.

    Reads a few bytes of each file, of many files in parallel.

    Args:
        rows: with the ``size`` of each file.
        samples: the ``sample_key`` of each cached video's file.

    Raises UsageError where the store does not answer.
    """
    groups = defaultdict[str, list[int]](list)  # file or archive -> its rows
    for number, row in enumerate(rows):
        groups[row["uri"] if row["source_offset"] is None else row["uri"].partition("#")[0]].append(number)
    is_replaced_by_row = [False] * len(rows)
    with request_threads(min(_AT_ONCE, len(groups) or 1)) as pool:
        compare = partial(_compare_group, rows, samples, objects)
        for numbers, answers in zip(groups.values(), pool.map(compare, groups.values()), strict=True):
            for number, is_replaced in zip(numbers, answers, strict=True):
                is_replaced_by_row[number] = is_replaced
    return is_replaced_by_row


def _compare_group(
    rows: Sequence[ManifestRow], samples: Sequence[int], objects: Objects, numbers: Sequence[int]
) -> list[bool]:
    """Return a bool for each of ``numbers``: True if that row is replaced.

    The rows lie in one archive, or name one file.
    """
    with OpenArchives(objects) as opened:
        return [_is_replaced(rows[number], samples[number], objects, opened) for number in numbers]


def _is_replaced(row: ManifestRow, sample: int, objects: Objects, opened: OpenArchives) -> bool:
    """Return True if a row's file has another sample than the cached video's file; False if the file is gone.

    An archive's member without a sample counts as replaced. Raises UsageError where the store does not answer.
    """
    member = find_member(row["uri"], row["source_offset"], row["size"])
    if member is None:
        return sample_source(row["uri"], row["size"] or 0, objects) not in (None, sample)
    try:
        return opened.sample(member) != sample
    except FileNotFoundError:
        return False
    except OSError as error:
        raise make_no_answer(error) from error
