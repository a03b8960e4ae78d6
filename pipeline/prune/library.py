"""``pipeline.prune_videos``: the work of ``python -m jobs.prune``, called from Python."""

from __future__ import annotations

import os
from typing import Any

from pipeline.errors import UsageError
from pipeline.inputs.forms import FORMS, OF_COLUMNS
from pipeline.inputs.listings import suffix_of
from pipeline.options import config_of
from pipeline.prune.config import PruneConfig
from pipeline.prune.run import PruneRun
from pipeline.prune.summary import Summary
from pipeline.runner.library import ProgressOption, checked_outcome, console_for, run_here


def prune_videos(
    videos: object = "sample", *, out: str | os.PathLike[str] = "cache", progress: ProgressOption = True, **options: Any
) -> Summary:
    """Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray.

    >>> summary = pipeline.prune_videos("videos/", out="my-cache", model="tiny", num_frames=8)
    >>> print(summary)
    >>> summary.n_ok, summary.failed, summary.wall_s  # failed: video_id -> class of the error
    >>> pipeline.TokenCache(summary.out)

    The same call again goes on where the last one stopped. A Ray that this process has joined is used and left as it
    was; else one is started, or the cluster of RAY_ADDRESS is joined, and left at the end. No signal handler, logger or
    setting of Ray Data is changed for longer than the call takes. Calls in several threads, for different caches, share
    one Ray.

    Args:
        videos: as VIDEOS of ``python -m jobs.prune``: a folder, a glob, a file, a manifest, "sample". Or a list of
            paths, each called by its file's name, or of tars and zips. Or rows with video_id, uri and optional start_s,
            end_s: dicts, or a table of Arrow, pandas or Polars; they may name what a manifest in the current folder
            may.
        out: the cache to create or to continue.
        progress: True shows it on stderr: a bar on a terminal, one line in a notebook. False shows nothing. A function
            is called with a :class:`pipeline.Progress` whenever something is new; what it raises ends the run, which
            keeps what is committed.
        options: those of ``python -m jobs.prune --help-all`` by their names, ``--on-changed skip`` as
            ``on_changed="skip"``; not ``--dry-run`` and ``--plan``. A repeatable one is a list, and
            ``pruner_param`` may be a dict.

    Returns the counts of these videos in the cache.

    Raises:
        UsageError: the request cannot be carried out, and nothing was started.
        RunFailed: the run stopped; what is committed stays.
        TooManyFailed: (a RunFailed) it went through, and as many failed as end the command with 1: all of them, one by
            a bug, more than ``max_failed``; its ``summary`` is what would be returned.
    """
    given = None if isinstance(videos, str | os.PathLike) or _are_containers(videos) else videos
    named = videos if given is None else "videos from Python"
    config = config_of(PruneConfig, "prune_videos", {"videos": named, "out": out, **options})
    if given is not None and config.clips_from is not None:
        raise UsageError("clips_from is for tars and tables with a column of bytes; rows have start_s and end_s")
    with run_here():
        summary = PruneRun(config, console_for(progress), given, list_failed=True).run()
    return checked_outcome(summary, config, summary.n_videos, config.outside_limit(summary.n_videos))


def _are_containers(videos: object) -> bool:
    """Return whether videos are a list of paths, tars or zips among them."""
    names = [os.fspath(one) for one in videos if isinstance(one, str | os.PathLike)] if isinstance(videos, list) else []
    return any(suffix_of(name) in FORMS.keys() - OF_COLUMNS for name in names)
