"""jobs.inspect: what it shows, lists and writes of caches and of answers, what it refuses, and how it fails."""

import os
import pty
import select
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

import pipeline
from gstep.backbones import Backbone
from jobs import compact, inspect, prune, recode
from pipeline import TokenCache
from pipeline.errors import RatioNotCached, UnknownVideo, UsageError
from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.runner.claim import Claim, find_holder
from pipeline.runner.run_record import RunFile
from pipeline.storage.stores import LocalStore
from tests.builders.clips import sample
from tests.builders.runs import document_of, said_by
from tests.pipeline.pages import FRAMES, VIDEO, build, decoded_clip, pictures_of
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> TokenCache:
    return build(tmp_path_factory.mktemp("out") / "cache", decoded_clip(tmp_path_factory.mktemp("videos")))


def document(*argv: object) -> dict:
    code, found, _ = document_of(inspect, [str(word) for word in argv])
    assert code == 0
    return found


def test_a_cache_as_a_document(cache):
    found = document(cache.store)
    assert (found["cache"], found["n_videos"], found["n_ok"], found["n_failed"]) == (str(cache.store), 2, 1, 1)
    assert found["failures"] == {"corrupt": 1} and found["examples"] == {"corrupt": ["bad.mp4", "the file is cut off"]}
    assert found["identity"]["retention_ratio"] == 0.25 and found["last_run"] is None
    assert found["table"] == {"small": 1, "sorted": 0, "foreign": []}
    assert {"tokens_in", "tokens_kept", "token_bytes", "seconds", "n_warned", "n_outside", "exit_code"} <= found.keys()


def test_a_video_as_a_document_and_as_a_page_with_pictures(cache, tmp_path):
    found = document(cache.store, VIDEO, "--retention-ratio", "0.1")
    assert (found["status"], found["retention_ratio"], found["n_kept"]) == ("ok", 0.1, 156)
    assert sum(found["kept_per_frame"]) == 156 and sum(found["row"]["kept_per_frame"]) == 392
    found = document(cache.store, "bad.mp4")
    assert (found["status"], found["n_kept"], found["row"]["error_class"]) == ("failed", None, "corrupt")
    file = tmp_path / "page.html"
    said = said_by(inspect, cache.store, "--html", file, "--video-root", "/", VIDEO)
    assert f"{VIDEO} with pictures of its frames" in said and len(pictures_of(file.read_text())) == FRAMES


def test_what_failed_is_a_list_of_ids_classes_and_messages(cache, tmp_path, capsys):
    assert inspect.main([str(cache.store), "--failed"]) == 0
    assert capsys.readouterr().out == "bad.mp4\tcorrupt\tthe file is cut off\n"
    said = {"stage": "decode", "class": "corrupt", "message": "the file is cut off", "attempts": 1}
    bad = {"video_id": "bad.mp4", "uri": "/videos/bad.mp4", **said}
    store = shutil.copytree(cache.store.root, tmp_path / "c")
    assert document(store, "--failed")["failed"] == [bad]
    said_by(compact, store)  # found through an index too
    found = document(store, "--failed")
    assert found["n_failed"] == 1 and found["failed"] == [bad]


def write_answers(folder: Path) -> Path:
    """Write an answer and a question that failed."""
    store = LocalStore(folder)
    write_answers_header(store, {"retention_ratio": 0.1})
    asked = {"video_ids": [VIDEO], "prompt": "What?", "attempts": 1}
    kept = {"n_visual_tokens": 6, "n_prompt_tokens": 9, "n_total": 60, "n_kept": 6}
    seconds = {"load_s": 0.1, "prefill_s": 0.1, "decode_s": 0.1, "batch_size": 1}
    good = {**asked, "question_id": "1", "status": "ok", "answer": "a bike", **kept, **seconds}
    bad = {**asked, "question_id": "2", "status": "failed", "error_class": "io", "error_message": "gone"}
    commit_answers(store, "run", 0, [good, bad])
    return store.root


def test_answers_are_shown_and_listed_and_what_is_not_among_them_is_refused(tmp_path):
    answers = write_answers(tmp_path / "answers")
    said = said_by(inspect, answers)
    assert "1 answered, 1 failed" in said and "a bike" in said
    assert "6 of 60" in said_by(inspect, answers, "1")
    assert "2 io gone" in said_by(inspect, answers, "--failed")
    assert document(answers)["n_ok"] == 1
    assert document(answers, "1")["rows"][0]["answer"] == "a bike"
    found = document(answers, "--failed")
    assert [(item["question_id"], item["class"]) for item in found["failed"]] == [("2", "io")]
    said = said_by(inspect, answers, "11", code=2)
    assert "'11' is not among the 2 answers" in said and "did you mean 1?" in said
    assert "holds answers" in said_by(inspect, answers, "1", "--retention-ratio", "0.1", code=2)
    assert f"name {answers} or" in said_by(inspect, tmp_path, code=2)


def test_watching_ends_at_ctrl_c_and_the_run_goes_on(cache, tmp_path):
    """In a process that is forked from this one, with a terminal."""
    store = LocalStore(shutil.copytree(cache.store.root, tmp_path / "c"))
    shown = bytearray()

    def read() -> str:
        while select.select([terminal], [], [], 0.1)[0]:
            try:
                shown.extend(os.read(terminal, 4096))
            except OSError:  # the other side is closed
                break
        return shown.decode()

    with Claim(store, "r9", print):
        pid, terminal = pty.fork()
        if pid == 0:
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # not what captures the output of this test
            os._exit(inspect.main([str(store), "--watch"]))
        wait_until(lambda: "r9 on" in read(), read)
        os.kill(pid, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
        assert "the run itself continues" in read() and "Traceback" not in read()
        assert find_holder(store)["run_id"] == "r9"


def test_watching_a_run_that_has_ended_says_how(cache, tmp_path):
    store = LocalStore(shutil.copytree(cache.store.root, tmp_path / "c"))
    for status, code in (("finished", 0), ("failed", 1)):
        RunFile(store, {"run_id": "r9", "host": "h", "pid": 1, "videos": 1}).save(status=status, error="the end")
        assert f"r9 on h (pid 1) {status}" in said_by(inspect, store.root, "--watch", code=code)
    code, found, _ = document_of(inspect, [str(store.root), "--watch"])
    assert (code, found["last_run"]["status"]) == (1, "failed")


CLIP = str(sample("bikes.mp4"))
METHODS = ["gstep", "vidcom2", "random,seed=1"]
LABELS = {"gstep": "gstep", "visionzip": "visionzip", "random": "random,seed=3"}


def test_a_file_is_shown_and_written(tmp_path):
    page = tmp_path / "page.html"
    argv = [CLIP, "--method", *METHODS, "--num-frames", "3", "--html", str(page), "--retention-ratio", "25%", ".10"]
    text = said_by(inspect, *argv)
    assert "in common at 25 %" in text and f"{page}: " in text and "bikes.mp4 with pictures of its frames" in text
    html = page.read_text()
    assert len(pictures_of(html)) == 3 and html.count("data-method=") == 6
    code, document, _ = document_of(inspect, [*argv, "a name"])
    assert (code, document["video_id"], document["page"]) == (0, "a name", str(page))
    assert [(row["method"], row["retention_ratio"]) for row in document["selections"]] == [
        (method, ratio) for ratio in (0.25, 0.1) for method in METHODS
    ]
    found = pipeline.compare(CLIP, methods=METHODS, retention_ratios=[0.25, 0.1], num_frames=3)
    assert [row["kept_per_frame"] for row in document["selections"]] == [row.kept_per_frame for row in found.rows]


@pytest.fixture(scope="module")
def caches(one_ray, tmp_path_factory) -> Path:
    """A folder with the videos ``v`` and caches of them: of gstep, of a merging method, and of all tokens."""
    folder = tmp_path_factory.mktemp("caches")
    (folder / "v").mkdir()
    shutil.copy(CLIP, folder / "v")
    (folder / "v" / "text.mp4").write_text("this is no video\n" * 50)
    ways = {"gstep": "", "visionzip": "--pruner visionzip", "whole": "--pruner none --evidence visionzip"}
    ways |= {"random": "--pruner random --seed 3", "fastvid": "--pruner fastvid --siglip tiny"}
    for name, flags in ways.items():
        said_by(prune, folder / "v", *f"--num-frames 4 --dtype float32 {flags}".split(), "--out", folder / name)
    said_by(recode, folder / "whole", "--token-codec", "int8", "--out", folder / "coded")
    return folder


def compared(caches: Path, name: str, methods: list[str] | None = None, look=True, **options) -> pipeline.Comparison:
    """Compare on the clip of a cache, where its source may be looked at unless ``look`` is False."""
    roots = {"video_roots": [str(caches / "v")]} if look else {}
    return pipeline.compare(caches / name, "bikes.mp4", methods=methods, **roots, **options)


@pytest.mark.slow
def test_what_a_cache_stores_is_shown_as_it_is_stored(caches, idle):
    for name, label in LABELS.items():
        video = TokenCache(caches / name).get("bikes.mp4")
        for methods in (None, [], [label]):
            (row,) = compared(caches, name, methods).rows
            assert torch.equal(row.index, video.index) and row.retention_ratio == 0.25
            assert (row.merged is None) == (name != "visionzip")
            assert row.merged is None or torch.equal(row.merged, video.merged)
    found = compared(caches, "gstep", ["gstep"], look=False, retention_ratios=[0.10, 0.25])
    assert "are those that" in found.origin and "--video-root" in found.pictures.missing
    smaller = TokenCache(caches / "gstep").get("bikes.mp4", 0.10)
    assert torch.equal(found.selections["gstep", 0.10].index, smaller.index)
    assert found.to_html().count('class="blank"') == 8
    with pytest.raises(RatioNotCached):
        compared(caches, "visionzip", look=False, retention_ratios=[0.10])


@pytest.mark.slow
def test_methods_select_from_the_tokens_of_a_whole_cache_as_runs_do(caches, idle):
    methods = ["gstep", "visionzip", "random,seed=3", "vidcom2"]
    found = compared(caches, "whole", methods)
    for name, label in LABELS.items():
        video, row = TokenCache(caches / name).get("bikes.mp4"), found.selections[label, 0.25]
        assert torch.equal(row.index, video.index)
        assert row.merged is None or torch.equal(row.merged, video.merged)
    assert "which are all tokens" in found.origin and len(found.pictures.jpegs) == 4
    assert list(compared(caches, "whole", ["none", "gstep"], look=False).selections) == [("none", 1.0), ("gstep", 0.25)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["visionzip", "coded"])
def test_where_tokens_are_missing_the_source_is_encoded_again_once_by_the_cache_s_settings(caches, name, monkeypatch):
    calls, encode = [], Backbone.encode
    monkeypatch.setattr(Backbone, "encode", lambda self, *rest: calls.append(self.dtype) or encode(self, *rest))
    methods, ratios = ["gstep", "visionzip", "vidcom2"], [0.25, 0.10]
    found, whole = (compared(caches, cache, methods, retention_ratios=ratios) for cache in (name, "whole"))
    assert calls == [torch.float32]
    for key, row in found.selections.items():
        assert torch.equal(row.index, whole.selections[key].index)
    assert found.origin == "The source was encoded again, by the model and with the frames of the cache."
    assert found.metadata["frame_indices"] == whole.metadata["frame_indices"] and len(found.pictures.jpegs) == 4


@pytest.mark.slow
def test_the_checkpoint_of_evidence_is_the_one_of_the_cache_s_run(caches):
    found = compared(caches, "fastvid", ["fastvid", "gstep"])
    stored = TokenCache(caches / "fastvid").get("bikes.mp4")
    assert torch.equal(found.selections["fastvid", 0.25].index, stored.index) and found.origin.endswith("of the cache.")


@pytest.mark.slow
def test_a_selection_of_the_cache_that_the_source_does_not_give_again_is_noted(caches, monkeypatch):
    encode = Backbone.encode

    def scaled(self, *rest):
        visual = encode(self, *rest)
        visual.tokens[:2].mul_(-1)
        return visual

    monkeypatch.setattr(Backbone, "encode", scaled)
    found = compared(caches, "gstep", ["gstep", "vidcom2"])
    stored = TokenCache(caches / "gstep").get("bikes.mp4").index
    share = torch.isin(found.selections["gstep", 0.25].index, stored).double().mean().item()
    assert share < 1 and f"; of gstep at 0.25 the cache holds {share:.1%} of what is shown." in found.origin


@pytest.mark.slow
def test_nothing_is_ever_compared_on_a_part_of_the_tokens(caches, tmp_path):
    def shown(cache: str, *options: str, code: int = 2) -> str:
        return said_by(inspect, caches / cache, "bikes.mp4", "--method", *options, code=code)

    text = shown("gstep", "gstep", "vidcom2")
    assert "holds only the tokens of gstep at 0.25, and vidcom2 would select from all tokens" in text
    assert f"--video-root {caches / 'v'}" in text and "python -m jobs.prune --pruner none" in text
    assert "encoded again" in shown("gstep", "gstep", "vidcom2", "--video-root", str(caches / "v"), code=0)
    text = shown("coded", "visionzip")
    assert "holds its tokens as int8, not as the encoder gave them" in text and "--evidence visionzip" in text
    fastvid = ("fastvid", "--video-root", "/", "--siglip", "tiny")
    assert "fastvid" in shown("whole", *fastvid, code=0)
    moved = shutil.copytree(caches / "gstep", tmp_path / "moved")
    shutil.rmtree(moved / "runs")
    text = shown(str(moved), "vidcom2", "--video-root", "/")
    assert "says how its videos were encoded: compare on the video file" in text


@pytest.mark.slow
def test_another_model_other_frames_and_other_videos_are_refused(caches):
    with pytest.raises(UsageError, match=r"was made with other settings than the model has now: model\.weights"):
        compared(caches, "gstep", ["vidcom2"], model="shapes")
    with pytest.raises(UsageError, match="num_frames: a video of a cache has the frames and the precision"):
        compared(caches, "gstep", ["vidcom2"], num_frames=3)
    with pytest.raises(UsageError, match="is a cache: name one of its videos"):
        pipeline.compare(TokenCache(caches / "gstep"))
    with pytest.raises(UnknownVideo, match=r"did you mean bikes\.mp4"):
        pipeline.compare(TokenCache(caches / "gstep"), "bike.mp4")
    for methods in (None, ["vidcom2"]):
        with pytest.raises(UnknownVideo, match=r"'text\.mp4' failed: unsupported"):
            pipeline.compare(caches / "gstep", "text.mp4", methods=methods, video_roots=[str(caches / "v")])


@pytest.mark.slow
def test_a_source_that_has_changed_since_is_not_encoded(caches):
    clip = caches / "v" / "bikes.mp4"
    content = clip.read_bytes()
    try:
        clip.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UsageError, match=r"its source cannot be encoded again: .*has changed since"):
            compared(caches, "gstep", ["vidcom2"])
    finally:
        clip.write_bytes(content)
