"""``pipeline.prune_videos``: the work of ``python -m jobs.prune``, called from Python."""

from __future__ import annotations

import os
from typing import Any

from pipeline.errors import UsageError
from pipeline.inputs.forms import FORMS, TABLE_FORMS
from pipeline.inputs.listings import find_suffix
from pipeline.options import make_config
from pipeline.prune.config import PruneConfig
from pipeline.prune.run import prune
from pipeline.prune.summary import Summary
from pipeline.runner.python_calls import ProgressOption, check_outcome, make_console, run_here


def prune_videos(
    videos: object = "sample", *, out: str | os.PathLike[str] = "cache", progress: ProgressOption = True, **options: Any
) -> Summary:
    """Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray.

    >>> summary = pipeline.prune_videos("videos/", out="my-cache", model="tiny", num_frames=8)
    >>> print(summary)
    >>> summary.n_ok, summary.failed, summary.wall_s  # failed: video_id -> class of the error
    >>> pipeline.TokenCache(summary.out)

    The call is resumable: call it again to continue. A Ray that this process has joined is used and left as it was.
    Otherwise the call starts Ray, or joins the cluster of RAY_ADDRESS, and leaves it at the end. No signal handler,
    logger or setting of Ray Data stays changed after the call. Calls in several threads, for different caches, share
    one Ray.

    Args:
        videos: as VIDEOS of ``python -m jobs.prune``: a folder, a glob, a file, a manifest, "sample". Or a list of
            paths (the ids are the files' names) or of tars and zips. Or rows with video_id, uri and optional start_s,
            end_s: dicts, or a table of Arrow, pandas or Polars, under the rules of a manifest in the current folder.
        out: the cache to create or to continue.
        progress: True shows it on stderr: a bar on a terminal, one line in a notebook. False shows nothing. A function
            is called with a :class:`pipeline.Progress` at each change; an exception of it ends the run, and committed
            rows stay.
        options: the options of ``python -m jobs.prune --help-all`` by name, ``--on-changed skip`` as
            ``on_changed="skip"``; not ``--dry-run`` and ``--plan``. A repeatable option is a list, and ``pruner_param``
            may be a dict.

    Returns the counts of these videos in the cache.

    Raises:
        UsageError: the request cannot be carried out, and nothing was started.
        RunFailed: the run stopped; committed rows stay.
        TooManyFailed: (a RunFailed) the run finished, but more videos failed than ``max_failed`` allows, all failed, or
            a video failed by a bug; ``summary`` of the error is the summary of the run.
    """
    given_rows = None if isinstance(videos, str | os.PathLike) or _has_archives(videos) else videos
    names = videos if given_rows is None else "videos from Python"
    config = make_config(PruneConfig, "prune_videos", {"videos": names, "out": out, **options})
    if given_rows is not None and config.clips_from is not None:
        raise UsageError("clips_from is for tars and tables with a column of bytes; rows have start_s and end_s")
    if given_rows is not None and config.column is not None:
        raise UsageError(
            "column is for .parquet, .arrow and .feather files, named by a text; paths and rows have no other column"
        )
    with run_here():
        summary = prune(config, make_console(progress), given_rows, list_failed=True)
    return check_outcome(summary, config, summary.n_videos, config.infrastructure_limit(summary.n_videos))


def _has_archives(videos: object) -> bool:
    """Return True if ``videos`` is a list of paths with a tar or zip among them."""
    names = (
        [os.fspath(path) for path in videos if isinstance(path, str | os.PathLike)] if isinstance(videos, list) else []
    )
    return any(find_suffix(name) in FORMS.keys() - TABLE_FORMS for name in names)
