"""The life of a prune run on one page: ``prune`` and its steps, and ``pipeline.prune_videos`` at the end.

    check_request    prune/request.py       options, list of videos, model and method (prune/recipe.py)
    Claim            runner/claim.py        the note that this run writes here
    select_todo      prune/request.py       the rows of the cache (prune/table.py), the videos left (prune/todo.py)
    RunFile          runner/run_record.py   runs/<run_id>.json: provenance, plan and progress
    PruneJob         prune/graph.py         the plan of the workers, and their graph
    Stream           runner/stream.py       written shards, from a new graph each time the nodes change
    CommittedVideos  prune/committed.py     each shard committed and counted; PruneWatch may end the run
    summarise        prune/summary.py       counts of the committed rows

A video passes through ``Todo``, ``Decoder``, ``Encoder`` and ``Writer`` to ``CacheTable.commit``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from rich.console import Console

from gstep.checkpoints.tensors import compute_tower_hash
from pipeline.cache.header import get_codec, get_deepstack_levels, read_header
from pipeline.console import Say, make_speaker
from pipeline.errors import LimitReached, UsageError, convert_usage_errors, format_count
from pipeline.inputs.forms import FORMS, TABLE_FORMS
from pipeline.inputs.listings import find_suffix
from pipeline.options import make_config
from pipeline.prune.committed import CommittedVideos, PruneWatch
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import check_decoder_device
from pipeline.prune.facts import Facts
from pipeline.prune.graph import PruneJob
from pipeline.prune.request import Request, check_request
from pipeline.prune.resume import select_existing, select_retries
from pipeline.prune.summary import Summary, summarize_videos
from pipeline.prune.table import CacheTable
from pipeline.prune.todo import Todo
from pipeline.rows import JsonObject
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import (
    check_device,
    choose_device,
    collect_provenance,
    find_failing_nodes,
    sum_resources,
)
from pipeline.runner.job import convert_store_errors, print_options
from pipeline.runner.monitor import Monitor
from pipeline.runner.python_calls import ProgressOption, check_outcome, isolate_run, make_console
from pipeline.runner.run_record import RunFile, find_newest_record, make_run_id
from pipeline.runner.stream import Stream, commit_all
from pipeline.runner.worker_reports import WorkerReport
from pipeline.storage.stores import Store
from pipeline.video.sampling import CHANGED_BY_RULES, DECODING_RULES

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "decord", "torchcodec")
# Fewer failures of one class never stop a run: a single missing folder may cause as many.
MIN_ALIKE_FAILURES = 50


def prune(config: PruneConfig, console: Console, given: object = None, *, list_failed: bool = False) -> Summary:
    """Decode, encode and prune the requested videos that the cache does not have yet, and return the summary.

    Prints the options and notes, and claims the cache. If nothing is left to process, no worker starts and no record of
    the run is written. After a run, small files of the videos table are merged, and those of a user method's old code
    deleted.

    Args:
        given: paths, or rows with video_id and uri; None if ``config.videos`` names the videos.
        list_failed: True to fill ``Summary.failed``.

    Raises:
        UsageError: the request was refused, and no video was processed. This includes CacheLocked if another run writes
            to the cache and ``--join`` is not given.
        RunFailed: the run stopped. Committed rows stay, and a rerun resumes.
        CorruptShard: a file of the videos table is damaged.
    """
    run_id = make_run_id()
    with convert_store_errors(make_speaker(console)):
        request = check_request(config, console, given)
        print_options(config, console)
        request.store.make()
        with Claim(request.store, run_id, make_speaker(console), join=config.join) as claim:
            request = request.match_cache()  # again: another run may have written before the claim was made
            start = time.monotonic()
            done = None
            table, todo = request.select_todo(run_id)
            with Monitor(request.store, run_id, claim.set_progress) as monitor:
                if len(todo):
                    done = process_videos(request, run_id, table, todo, monitor)
                else:  # no record, and no Ray is started
                    check_device(config, make_speaker(console))
            summary = make_summary(request, table, todo, done, time.monotonic() - start, list_failed=list_failed)
            summary = replace(summary, log=monitor.log)
            if done is not None:
                done.record.save(summary=summary.as_record())
                table.clean_up()
            return summary


def process_videos(request: Request, run_id: str, table: CacheTable, todo: Todo, monitor: Monitor) -> CommittedVideos:
    """Process the videos and commit their rows, then try failed videos once more; return the counts.

    Joins or starts Ray and waits for ``--min-gpus``; writes the header of a new cache and the run's record. Archives
    are indexed meanwhile. ``--max-hours`` ends the run with a note instead of an error.

    Raises:
        UsageError: the cluster lacks what the options require, the model cannot be read, or no archive holds a video.
        RunFailed: the run stopped.
    """
    config = request.config
    store = request.store
    recipe = request.recipe
    say = make_speaker(request.console)
    with todo:
        is_estimated = not todo.is_complete
        n_videos = todo.estimate_count()
        device, dtype = choose_device(config, recipe.dtype, say)  # joins the cluster; waits for --min-gpus
        todo.refuse_empty()
        monitor.start()
        check_decoder_device(config.decoder, device)
        with convert_usage_errors():
            stages = recipe.stages(device, dtype)
            stages = replace(stages, encode=replace(stages.encode, tower_hash=compute_tower_hash(recipe.source)))
            table.begin(recipe, dtype)
        _note_other_rules(store, say)
        about: JsonObject = {
            **collect_provenance(run_id, _RECORDED_VERSIONS),
            "decoding_rules": DECODING_RULES,
            "config": config.as_record(),
            "device": device,
            "dtype": dtype,
            "videos": n_videos,
            "estimated": is_estimated,
        }
        if (layout := recipe.source.layout) is not None:
            about = {**about, "parity": layout.get("parity")}
        with RunFile(store, about) as record:
            facts = Facts(recipe.token_bytes(), device == "cuda", config.max_hours)
            job = PruneJob(request, stages, run_id, record, facts)
            done = CommittedVideos(table, record, monitor, facts)
            max_alike = max(config.compute_infrastructure_limit(n_videos), MIN_ALIKE_FAILURES)
            watch = PruneWatch(done, todo, monitor, record, max_alike)
            try:
                commit_all(Stream(job, todo, watch), done.commit)
                todo.check()
                left_out = cast(JsonObject, request.videos.indexes.left_out.as_record())
                record.note(videos=len(todo), estimated=False, left_out=left_out)
                if len(retries := _select_second_pass(request, job, todo, done, watch.reports)):
                    watch.is_second_pass = True
                    commit_all(Stream(job, retries, watch), done.commit)
            except LimitReached as reached:
                record.note(ended_by=str(reached))
                say(f"note: {reached}. Progress is saved. Rerun the command to continue")
                for note in getattr(reached, "__notes__", ()):
                    say(note)
    return done


def _note_other_rules(store: Store, say: Say) -> None:
    """Print a note if the last run on this cache decoded by other rules."""
    record = find_newest_record(store)
    if record is not None and record.get("decoding_rules", 1) != DECODING_RULES:
        say(
            "note: another version of this program decoded the rows that the cache has. They stay as they are. "
            f"This run's frames or times differ for {CHANGED_BY_RULES}. --redo IDS decodes such videos again"
        )


def _select_second_pass(
    request: Request, job: PruneJob, todo: Todo, done: CommittedVideos, reports: Sequence[WorkerReport]
) -> Todo:
    """Return the failed videos to try once more (which have attempts left), and print a note if there are any.

    Nodes on which a stage failed at more than its average rate are excluded from now on, if the other nodes suffice;
    the result is then the videos with retryable faults. Otherwise it is the videos that could not be read and exist
    now.
    """
    without: dict[str, str] = {}
    for report in reports:
        without |= find_failing_nodes(report.tallies)
    attempts = request.config.max_attempts
    if without and job.can_run_on(sum_resources({**job.excluded_nodes, **without})):
        job.excluded_nodes = {**job.excluded_nodes, **without}
        retries = select_retries(todo.list_todo(), done.retryable, attempts)
        hosts = ", ".join(sorted(set(without.values())))
        why = f"failed, most of them on {hosts}. Retrying them on the other nodes"
    else:  # a missing file would fail again, after the start of all workers
        retries = select_existing(select_retries(todo.list_todo(), done.unread, attempts), request.objects)
        why = "could not be read (io), but can be found now. Trying again"
    if len(retries):
        job.say(f"note: {format_count(len(retries), 'video')} {why}")
    return Todo.of(retries)


def make_summary(
    request: Request,
    table: CacheTable,
    todo: Todo,
    done: CommittedVideos | None,
    wall_s: float,
    *,
    list_failed: bool = False,
) -> Summary:
    """Return the summary of this run's videos in the cache, and print notes on archives that were not read fully.

    New rows of the cache are read first. After ``--max-hours``, videos without a row count as waiting. ``done`` is None
    if there was nothing to process.
    """
    say = make_speaker(request.console)
    header = read_header(request.store)
    indexes = request.videos.indexes
    if todo.n_left:
        say(f"note: {todo.n_left} archives are not indexed yet; their videos are not in these counts")
    if todo.n_cut:
        consequence = "captions behind the last video were not read"
        say(f"note: {todo.n_cut} archives were read in part (--limit): {consequence}")
    summary = summarize_videos(
        table.ledger.refresh(),
        todo.list_videos(),
        get_deepstack_levels(header),
        get_codec(header["identity"]),
        sampling=header["identity"]["sampling"],
        n_waiting=todo.n_waiting,
        list_failed=list_failed,
        committed=table.committed,
    )
    summary = replace(
        summary,
        n_new=len(todo),
        n_new_failed=0 if done is None else len(done.failed),
        wall_s=wall_s,
        out=str(request.store),
        fetched_bytes=indexes.fetched + (0 if done is None else done.fetched),
        left_out=indexes.left_out.counts(),
        left_out_names=indexes.left_out.list_first_names_by_kind(),
    )
    if done is None:
        return summary
    facts = done.facts
    if facts.limit_reached:  # the other videos were not started, and wait as with --limit
        n_left = summary.n_missing
        n_videos, n_waiting = summary.n_videos - n_left, summary.n_waiting + n_left
        n_new = min(facts.videos, len(todo))  # the second pass counted videos twice
        summary = replace(summary, n_new=n_new, n_missing=0, n_videos=n_videos, n_waiting=n_waiting)
    return replace(summary, facts=facts.as_record(wall_s))


def prune_videos(
    videos: object = "sample", *, out: str | os.PathLike[str] = "cache", progress: ProgressOption = True, **options: Any
) -> Summary:
    """Decode videos, encode them, prune their visual tokens and write them to a Parquet cache, on Ray.

    >>> summary = pipeline.prune_videos("videos/", out="my-cache", model="tiny", num_frames=8)
    >>> print(summary)
    >>> summary.n_ok, summary.failed, summary.wall_s  # failed: video_id -> class of the error
    >>> pipeline.TokenCache(summary.out)

    Call it again to resume. If this process has joined Ray, that Ray is used and keeps running. Otherwise the call
    starts Ray or joins the cluster of RAY_ADDRESS, and leaves it at the end. Signal handlers, loggers and settings of
    Ray Data are restored. Calls in several threads, for different caches, share one Ray.

    Args:
        videos: the VIDEOS of ``python -m jobs.prune``: a folder, a glob, a file, a manifest or "sample". Or a list of
            paths (whose file names become the ids), or of tars and zips. Or rows with video_id, uri and optional
            start_s, end_s: dicts, or a table of Arrow, pandas or Polars, treated as a manifest in the current folder.
        out: the cache to create or to continue.
        progress: True shows progress on stderr, as a bar on a terminal or a line in a notebook. False shows nothing. A
            function is called with a :class:`pipeline.Progress` at each change; an exception that it raises ends the
            run, and committed rows stay.
        options: the options of ``python -m jobs.prune --help-all`` by name, except ``--dry-run`` and ``--plan``:
            ``on_changed="skip"`` for ``--on-changed skip``. A repeatable option is a list; ``pruner_param`` may be a
            dict.

    Returns:
        The counts of these videos in the cache, also those of earlier calls.

    Raises:
        UsageError: the request cannot be carried out, and no video was processed.
        RunFailed: the run stopped; committed rows stay.
        CorruptShard: a file of the videos table is damaged.
        TooManyFailed: (a RunFailed) the run finished, but more videos failed than ``max_failed`` allows, all failed, a
            video failed because of a bug, or rows are lost. Its ``summary`` is the summary of the run.
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
    with isolate_run():
        summary = prune(config, make_console(progress), given_rows, list_failed=True)
    return check_outcome(summary, config, summary.n_videos, config.compute_infrastructure_limit(summary.n_videos))


def _has_archives(videos: object) -> bool:
    """Return True if ``videos`` is a list that contains the path of a tar or zip."""
    names = (
        [os.fspath(path) for path in videos if isinstance(path, str | os.PathLike)] if isinstance(videos, list) else []
    )
    return any(find_suffix(name) in FORMS.keys() - TABLE_FORMS for name in names)
