"""What a cache holds for a manifest: counted from its rows, whatever a run believes."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from pipeline.cache.header import read_fingerprint
from pipeline.cache.live import Ledger
from pipeline.cache.merging import merge_table_files
from pipeline.errors import FAULTS, VideoFault
from pipeline.prune.frame_limits import make_limits
from pipeline.prune.summary import Summary, render_summary, summarize_videos
from pipeline.rows import SIZES_DIFFER
from tests.builders.caches import encoded, encoded_failure, random_tokens, source_record, write_header, write_shard
from tests.builders.runs import printed
from tests.paths import ROOT

SHAPE = (4, 25, 16)  # 100 tokens, of which 25 are kept


def manifest(*ids: str) -> pa.Table:
    return pa.table({"video_id": list(ids)})


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    """a and b are ok, b with warnings; c and e failed as damaged, d timed out, and c once before."""
    store = write_header(tmp_path)
    corrupt = VideoFault("corrupt", "torn")
    write_shard(store, "r1", encoded_failure("c", VideoFault("crash", "x")))
    write_shard(
        store,
        "r2",
        encoded("a", random_tokens(0, SHAPE), 0.25, "gstep", decode_s=1.0, encode_s=2.0),
        encoded("b", random_tokens(1, SHAPE), 0.25, "gstep", decode_s=3.0, decode_warnings=2),
        encoded_failure("c", corrupt, attempts=2, decode_s=0.5),
        encoded_failure("d", VideoFault("timeout", "slow")),
        encoded_failure("e", corrupt),
    )
    return Ledger(store).refresh()


def test_a_whole_cache_is_shown_with_the_remedies(ledger):
    summary = summarize_videos(ledger)
    assert (summary.n_videos, summary.n_ok, summary.n_missing, summary.n_warned) == (5, 2, 0, 1)
    assert list(summary.failures.items()) == [("corrupt", 2), ("timeout", 1)]  # c's older row counts no more
    assert summary.examples["corrupt"] in {("c", "torn"), ("e", "torn")}
    assert summary.examples["timeout"] == ("d", "slow")
    assert (summary.tokens_in, summary.tokens_kept, summary.token_bytes) == (200, 50, 50 * 16 * 2)
    assert (summary.seconds["decode"], summary.seconds["encode"]) == (4.5, 2.0)
    assert "this run" not in shown(summary)
    held = summarize_videos(ledger, manifest(*"abcde", "f"), n_waiting=1)
    said = shown(replace(held, n_new=4, n_new_failed=1, wall_s=2.0, log="[old]/runs/r.log"))
    assert "crashed workers are in [old]/runs/r.log" in said  # a path is no markup
    assert "2 ok, 3 failed, 0 without a row, 1 wait for another run (--limit, --max-hours)" in said
    assert "50 kept of 200 (25.0%)" in said and "1,600 of tokens" in said
    assert "1 video decoded with warnings of FFmpeg" in said and "4 videos (1 failed) in 2.0 s" in said
    assert FAULTS["timeout"].remedy in said and "d: slow" in said


def test_the_videos_of_a_manifest_alone(ledger):
    summary = summarize_videos(ledger, manifest("a", "d", "new", "later"), n_waiting=1)
    assert (summary.n_videos, summary.n_ok, summary.n_failed, summary.n_missing, summary.n_waiting) == (3, 1, 1, 1, 1)
    assert (summary.tokens_kept, summary.n_warned, summary.failures) == (25, 0, {"timeout": 1})
    assert summary.exit_code(9) == 1 and summarize_videos(ledger, manifest("a", "d")).exit_code(1) == 0


def test_what_came_from_outside_the_videos_is_counted(tmp_path):
    faults = [
        *(VideoFault("io", "gone"), VideoFault("corrupt", "torn"), VideoFault("crash", "died", stage="encode")),
        VideoFault("internal", "a bug", stage="prune"),
        VideoFault("out-of-memory", "CUDA out of memory", stage="encode"),
        VideoFault("out-of-memory", "beyond --decode-memory"),
    ]
    store = write_header(tmp_path)
    write_shard(store, "r1", *(encoded_failure(f"v{number}", fault) for number, fault in enumerate(faults)))
    summary = summarize_videos(Ledger(store).refresh())
    assert (summary.n_outside, summary.n_failed, summary.n_ok) == (3, 6, 0)
    assert summary.failures == {"out-of-memory": 2, "io": 1, "internal": 1, "corrupt": 1, "crash": 1}


def shown(summary) -> str:
    return " ".join(printed(render_summary(summary)).split())


def test_the_page_explains_every_line_of_the_summary():
    most = Summary(
        n_videos=1, n_ok=1, failures={}, examples={}, n_missing=0, n_new=1, n_new_failed=0, wall_s=1.0, n_waiting=1,
        tokens_in=1, tokens_kept=1, token_bytes=1, seconds={"decode": 1.0}, n_warned=1, warned=["v"],
        other_decoder={"why": 1}, remarks=dict.fromkeys(("hdr", "stretched", "uneven", "shared"), 1), n_removed=1,
        fetched_bytes=1, n_lost=1, lost=["v"], left_out={"txt": 1}, facts={"encoder_busy": 0.5, "decode_core_s": 1.0},
        frame_limits=make_limits({"fps": 1.0, "max_frames": 8}, 1, source_record("v", (8, 1, 1)), 1, ["v"], 1),
    )  # fmt: skip
    page = (ROOT / "pipeline/prune/README.md").read_text()
    names = [line[: len("from stores")].strip() for line in str(most).splitlines()]
    assert {"videos", "from stores", "lost", "its pace", "positions", "frames"} <= {*names}
    assert [name for name in names if name and f"| {name} |" not in page] == []


def test_lost_rows_are_a_trouble_of_a_run(ledger):
    lost = replace(summarize_videos(ledger, manifest("a")), n_lost=2, lost=["x", "y"])
    (text,) = lost.iter_troubles("video", 1)
    assert text.startswith("2 committed videos without a row in any file of videos/ (x, y): restore the files of")


def test_what_rows_remark_on_their_videos_is_a_line_each(tmp_path):
    """Also once the rows lie in a sorted file. The first with warnings are named in the order of the list."""
    missing, other = "decord: ModuleNotFoundError: No module named 'decord'", "decord: IndexMismatch: it is rotated"
    counted = "decord: IndexMismatch: of H.264 the decoder counts {} frames, the file lists 250"
    remarks = [
        {"backend_note": f"{missing}; {SIZES_DIFFER}: 2 sizes from 96x64 to 192x128", "color_transfer": "smpte2084"},
        {"backend_note": missing, "color_transfer": "arib-std-b67", "sample_aspect_ratio": "16:15"},
        {"backend_note": other, "color_transfer": "bt709", "sample_aspect_ratio": "1:1"},
        {"backend_note": counted.format(249), "uneven_positions": 3, "shared_positions": 0},
        {"backend_note": counted.format(12), "uneven_positions": 0, "shared_positions": 8},
        {"backend_note": "index made by decoding: the frame at 78848 does not come out", "uneven_positions": 1},
        *({"backend_note": f"{SIZES_DIFFER}: 3 sizes", "decode_warnings": 7} for _ in range(5)),
        {},
    ]
    failed = {"color_transfer": "smpte2084", "decode_warnings": 1}
    store = write_header(tmp_path)
    videos = [encoded(f"v{i}", random_tokens(i, SHAPE), 0.25, "gstep", **more) for i, more in enumerate(remarks)]
    write_shard(store, "r1", *videos[:8])
    write_shard(store, "r2", *videos[8:], encoded_failure("bad", VideoFault("corrupt", "x"), **failed))
    backwards = [*(f"v{i}" for i in reversed(range(len(videos)))), "bad"]
    in_parts = pa.chunked_array([backwards[:5], backwards[5:]])
    for ledger in (Ledger(store).refresh(), merged(store)):
        summary = summarize_videos(ledger, pa.table({"video_id": in_parts}))
        assert summary.other_decoder == {missing: 2, counted.format("N").replace("250", "N"): 2, other: 1}
        assert summary.remarks == {"hdr": 2, "stretched": 1, "uneven": 2, "shared": 1}
        assert (summary.n_warned, summary.warned) == (5, ["v10", "v9", "v8"])
        lines = shown(summary)
        for said in (
            f"5 videos by another decoder than the requested one: {missing} (2 videos); ",
            "warnings 5 videos decoded with warnings of FFmpeg, whose frames may be damaged: v10, v9, v8 and 2 more",
            "pictures 2 videos in HDR (PQ or HLG): colors are taken as stored, without tone mapping",
            "pictures 1 video with pixels that are not square: frames are not stretched",
            "positions 2 videos with unevenly spaced frames",
            "positions 1 video with temporal patches that share a position in time",
        ):
            assert said in lines, lines
        assert summarize_videos(ledger, manifest("v6", "v7")).other_decoder == {}
        json.dumps(summary.as_record())
    quiet = shown(summarize_videos(Ledger(write_header(tmp_path / "empty")).refresh()))
    assert "decoder" not in quiet and "pictures" not in quiet and "positions" not in quiet


def test_videos_that_a_limit_gave_other_frames_are_counted_from_their_rows(tmp_path):
    """At 2 frames a second with a limit of 4; the rows of v7 and v8 are of an older version."""
    store = write_header(tmp_path)
    by_rate = [0, 0, 10, 1, 300, 2, 5, None, None]
    videos = [
        encoded(f"v{i}", random_tokens(i, SHAPE), 0.25, "gstep", frames_by_rate=n, clip_frames=2 * (n or 1))
        for i, n in enumerate(by_rate)
    ]
    write_shard(store, "r1", *videos[:5])
    failure = encoded_failure("bad", VideoFault("corrupt", "x"), frames_by_rate=9999)
    write_shard(store, "r2", *videos[5:], failure)
    sampling = {"fps": 2.0, "max_frames": 4, "min_frames": 4}
    ids = [f"v{i}" for i in reversed(range(9))]
    for ledger in (Ledger(store).refresh(), merged(store)):
        limits = summarize_videos(ledger, manifest(*ids, "bad"), sampling=sampling).frame_limits
        assert limits == {
            **{"fps": 2.0, "max_frames": 4, "min_frames": 4, "n_capped": 3, "n_filled": 2, "n_unknown": 2},
            **{"lowest_fps": 4 / 600 * 4.0, "longest": "v4", "filled": ["v5", "v3"]},
        }
        lines = shown(summarize_videos(ledger, sampling=sampling))
        for said in (
            "frames 3 videos were capped at 4 frames (lowest rate 0.027 frames per second, of v4); --max-frames raises",
            "frames 2 short videos got more frames than --fps 2 gives, since this model takes at least 4 where a video",
            "frames 2 rows of an older version: whether a limit changed the number of frames is not known",
        ):
            assert said in lines, lines
        part = summarize_videos(ledger, manifest("v2"), sampling=sampling)
        assert part.frame_limits["longest"] == "v2" and "1 video was capped at 4 frames" in shown(part)
        assert json.loads(json.dumps(part.as_record()))["frame_limits"]["n_capped"] == 1
        for quiet in (summarize_videos(ledger, manifest("v0", "v1"), sampling=sampling), summarize_videos(ledger)):
            assert "frames" not in shown(quiet)
        assert summarize_videos(ledger, sampling={"num_frames": 4}).frame_limits is None
        uncapped = summarize_videos(ledger, sampling={**sampling, "max_frames": None}).frame_limits
        assert (uncapped["n_capped"], uncapped["n_filled"], uncapped["longest"]) == (0, 5, None)


def merged(store) -> Ledger:
    """The same cache, once its rows lie in a sorted file."""
    merge_table_files(store, read_fingerprint(store), everything=True)
    return Ledger(store).refresh()
