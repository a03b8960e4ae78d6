"""What the terminal shows of a cache, of one video, and of answers with those that failed."""

import json
from datetime import timedelta

import pytest

from pipeline import TokenCache
from pipeline.errors import RatioNotCached, UnknownVideo
from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.inspect.answers import MAX_SHOWN, Answers, render_answers_report, render_question_report
from pipeline.inspect.report import (
    count_cache,
    format_source_frames,
    list_source_facts,
    list_step_frames,
    render_cache_report,
    render_video_report,
)
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.pipeline.pages import FRAMES, VIDEO, build, shown


def test_a_cache_is_shown_with_its_identity_its_counts_and_its_videos(cache):
    text = shown(render_cache_report(cache, *count_cache(cache)))
    assert "retention ratio 0.25" in text and f"frames  {FRAMES} frames per video (--num-frames): evenly spread" in text
    assert "1 small file (a commit each) and 0 merged files in videos/" in text
    assert "1 ok, 1 failed" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("bikes"))
    assert VIDEO in row and [cell.strip() for cell in row.split("│")][1:5] == [str(FRAMES), "0.8", "1,568", "392"]


def test_a_video_is_shown_frame_by_frame(cache):
    text = shown(render_video_report(cache, VIDEO))
    row = cache.metadata(VIDEO)
    assert "\n392 of 1,568 tokens kept (25.0%)\n" in text
    assert "sampled  source fps 25, sampled at 0.8 fps, 8 frames " in text and "limit" not in text
    lines = [line.split("│") for line in text.splitlines() if line.count("│") == 5]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [int(line[4]) for line in cells[-FRAMES:]] == row["kept_per_frame"]
    assert [int(line[1]) for line in cells[-FRAMES:]] == row["frame_indices"]
    assert "156 of 1,568 tokens kept (9.9%)" in shown(render_video_report(cache, VIDEO, 0.10))


def test_what_was_carried_stands_with_the_video_and_names_are_no_markup(decoded, tmp_path):
    """Rich would take [red] for a colour, and refuse [/b]. A cache of many videos names the first."""
    carried = {"txt": "A [bike]\nby a \x1b[31mlake", "json": {"id": 7}, "missing": None, "[/b]": "x"}
    name = "[red]a[/b].mp4"
    cache = build(tmp_path / "c", decoded, video_id=name, uri="[red]b[/b].mp4", manifest=json.dumps(carried))
    write_shard(cache.store, "more", *(encoded(f"v{i}", random_tokens(i), 0.25, "gstep") for i in range(22)))
    cache.refresh()
    of_cache = shown(render_cache_report(cache, *count_cache(cache)))
    of_video = " ".join(shown(render_video_report(cache, name)).split())
    assert name in of_cache and "... and 3 more" in of_cache and "[red]b[/b].mp4" in of_video
    assert 'txt A [bike] by a [31mlake json {"id": 7} [/b] x run' in of_video and "missing" not in of_video


def test_a_failed_or_removed_video_is_shown_with_the_reason(decoded, tmp_path):
    cache = build(tmp_path / "c", decoded)
    assert "failed  corrupt in decode: the file is cut off" in shown(render_video_report(cache, "bad.mp4"))
    remove_videos(cache.store, [VIDEO], "asked for", lambda line: None, timedelta(0))
    assert "\nremoved  asked for" in shown(render_video_report(TokenCache(tmp_path / "c"), VIDEO))


def test_what_is_not_cached_is_refused(cache):
    for error, asked in (UnknownVideo, ("nope",)), (RatioNotCached, (VIDEO, 0.5)):
        with pytest.raises(error):
            render_video_report(cache, *asked)


def test_facts_name_the_clip_and_what_was_repeated(cache):
    row = cache.metadata(VIDEO)

    def facts(sampling=None, **more) -> dict[str, str]:
        return dict(list_source_facts({**row, **more}, sampling or {"num_frames": FRAMES}))

    assert not {"clip", "limit", "repeated", "note", "pixels"} & facts().keys()
    assert facts(start_s=None, end_s=2.5)["clip"] == "0 s to 2.5 s"
    assert facts(start_s=1.5, end_s=None)["clip"] == "1.5 s to the end"
    assert facts(n_repeated=3, clip_frames=5)["repeated"] == "3 sampled frames: the clip has only 5 frames"
    assert facts(decode_warnings=2)["decoder"].endswith(", 2 warnings")
    assert facts(color_transfer="smpte2084")["colors"].startswith("transfer function smpte2084, which is HDR: taken as")
    assert facts(color_transfer="bt709")["colors"] == "transfer function bt709"
    assert facts(sample_aspect_ratio="16:15")["pixels"].startswith("16:15 (width to height), not square")
    assert facts(backend_note="frame sizes differ: 2 sizes")["note"] == "frame sizes differ: 2 sizes"
    assert facts(clip_fps=row["fps"] / 2)["sampled"].startswith("source fps 25 on average, sampled at 0.4 fps")
    assert facts(clip_frames=0)["sampled"].startswith("source fps 25, sampled at unknown fps")  # of another program
    assert facts({"fps": 1.0, "max_frames": 8}, frames_by_rate=10)["limit"].startswith(
        "--fps 1 gives 10 frames of this clip, capped at 8"
    )
    assert "limit" not in facts({"fps": 1.0, "max_frames": 8}, frames_by_rate=0)


def test_frames_of_a_pair_stand_together_and_the_last_may_be_alone():
    row = {"frame_indices": [0, 3, 7, 9, 12], "n_frames": 3}
    assert list_step_frames(row) == [[0, 1], [2, 3], [4]]
    shown_frames = [format_source_frames(row, frames) for frames in list_step_frames(row)]
    assert shown_frames == ["frames 0, 3", "frames 7, 9", "frame 12"]
    assert list_step_frames({"frame_indices": [4, 5], "n_frames": 2}) == [[0], [1]]


IDENTITY = {
    "cache": {"pruner": {"method": "gstep"}, "retention_ratio": 0.25},
    "model": {"type": "llava_onevision", "weights": "hub:x@1"},
    "retention_ratio": 0.1,
}
GOOD = {
    "status": "ok", "attempts": 1, "n_visual_tokens": 6, "n_prompt_tokens": 10, "n_new_tokens": 3, "n_total": 60,
    "n_kept": 6, "load_s": 0.5, "prefill_s": 0.5, "decode_s": 0.5, "batch_size": 1, "answer": "this",
}  # fmt: skip
FAILED = {"status": "failed", "attempts": 2, "error_class": "io", "error_message": "it cannot be read"}


def row(question_id: str, values=GOOD, **more):
    return {"question_id": question_id, "video_ids": ["v.mp4"], "prompt": "What?", **values, **more}


def stored(tmp_path, *rows) -> LocalStore:
    store = LocalStore(tmp_path / "answers")
    store.make()
    write_answers_header(store, IDENTITY)
    commit_answers(store, "run", 0, rows)
    return store


def test_counts_failures_and_the_first_questions_are_shown(tmp_path):
    rows = [row(f"q{n:02}", target="[/b]") for n in range(MAX_SHOWN + 2)]
    said = shown(render_answers_report(Answers.open(stored(tmp_path, *rows, row("b", FAILED, target=None)))))
    assert f"{MAX_SHOWN + 2} answered, 1 failed" in said and "hub:x@1" in said and "gstep at 0.25" in said
    assert "failed: io" in said and "it cannot be read" in said and "--retry-failed" in said
    assert "q00" in said and f"q{MAX_SHOWN:02}" not in said and "... and 3 more" in said
    assert next(line for line in said.splitlines() if "q00" in line).split("│")[3:] == [" this       ", " [/b]   "]


def test_the_letter_of_a_choice_is_followed_by_its_text(tmp_path):
    plain = row("q1", answer="B", choices=["red", "yellow"], choice=1)
    lettered = row("q2", answer="A", choices=["A. red", "B. yellow"], choice=0)
    written = row("q3", answer="It is red", choices=["red", "yellow"], choice=0)
    store = stored(tmp_path, plain, lettered, written, row("q4", answer="B"))
    lines = shown(render_answers_report(Answers.open(store))).splitlines()
    answers = {cells[0].strip(): cells[3].strip() for cells in (line.split("│") for line in lines) if len(cells) == 5}
    assert answers == {"q1": "B. yellow", "q2": "A. red", "q3": "It is red", "q4": "B"}
    assert "B. yellow" in shown(render_question_report(Answers.open(store, "q1")))


def test_a_question_is_shown_whole_under_each_pruning(tmp_path):
    choices = {"choices": ["a dog", "a cat"], "choice": 1, "choice_scores": [-2.0, float("-inf")]}
    store = stored(
        tmp_path, row("q", pruning="gstep@0.1", **choices), row("q", FAILED, pruning="uniform@0.1"), row("other")
    )
    answers = Answers.open(store, "q")
    said = shown(render_question_report(answers))
    assert "a dog  (log-probability -2.000)" in said and "gstep@0.1" in said and "io: it cannot be read" in said
    assert "6 of 60" in said and "other" not in said
    assert "gstep@0.1" in shown(render_answers_report(Answers.open(store)))


def test_a_conversation_is_shown_turn_by_turn(tmp_path):
    turns = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Who is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A dog."}]},
        {"role": "user", "content": [{"type": "text", "text": "What?"}]},
    ]
    store = stored(tmp_path, row("q", conversation=json.dumps(turns)))
    lines = [line.split() for line in shown(render_question_report(Answers.open(store, "q"))).splitlines()]
    assert ["user", "(video)", "Who", "is", "it?"] in lines and ["assistant", "A", "dog."] in lines
    assert ["prompt", "What?"] in lines
