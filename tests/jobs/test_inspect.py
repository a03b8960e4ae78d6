"""jobs.inspect: what it shows, lists and writes of caches and of answers, what it refuses, and how it fails."""

import os
import pty
import select
import shutil
import signal
import sys
from pathlib import Path

import pytest

from jobs import compact, inspect
from pipeline import TokenCache
from pipeline.generate.answers import commit_answers, write_answers_header
from pipeline.runner.claim import Claim, find_holder
from pipeline.runner.run_record import RunFile
from pipeline.storage.stores import LocalStore
from tests.builders.runs import document_of, said_by
from tests.pipeline.pages import FRAMES, VIDEO, build, decoded_clip, pictures_of
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> TokenCache:
    return build(tmp_path_factory.mktemp("out") / "cache", decoded_clip(tmp_path_factory.mktemp("videos")))


def test_html_is_written_with_pictures(cache, tmp_path):
    file = tmp_path / "page.html"
    said = said_by(inspect, cache.store, "--html", file, "--video-root", "/", VIDEO)
    assert f"{VIDEO} with pictures of its frames" in said and len(pictures_of(file.read_text())) == FRAMES


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


def test_a_video_as_a_document(cache):
    found = document(cache.store, VIDEO, "--retention-ratio", "0.1")
    assert (found["status"], found["retention_ratio"], found["n_kept"]) == ("ok", 0.1, 156)
    assert sum(found["kept_per_frame"]) == 156 and sum(found["row"]["kept_per_frame"]) == 392
    found = document(cache.store, "bad.mp4")
    assert (found["status"], found["n_kept"], found["row"]["error_class"]) == ("failed", None, "corrupt")


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


@pytest.fixture
def answers(tmp_path) -> Path:
    store = LocalStore(tmp_path / "answers")
    write_answers_header(store, {"retention_ratio": 0.1})
    asked = {"video_ids": [VIDEO], "prompt": "What?", "attempts": 1}
    kept = {"n_visual_tokens": 6, "n_prompt_tokens": 9, "n_total": 60, "n_kept": 6}
    seconds = {"load_s": 0.1, "prefill_s": 0.1, "decode_s": 0.1, "batch_size": 1}
    good = {**asked, "question_id": "1", "status": "ok", "answer": "a bike", **kept, **seconds}
    bad = {**asked, "question_id": "2", "status": "failed", "error_class": "io", "error_message": "gone"}
    commit_answers(store, "run", 0, [good, bad])
    return store.root


def test_answers_are_shown_and_listed(answers):
    said = said_by(inspect, answers)
    assert "1 answered, 1 failed" in said and "a bike" in said
    assert "6 of 60" in said_by(inspect, answers, "1")
    assert "2 io gone" in said_by(inspect, answers, "--failed")
    assert document(answers)["n_ok"] == 1
    assert document(answers, "1")["rows"][0]["answer"] == "a bike"
    found = document(answers, "--failed")
    assert [(item["question_id"], item["class"]) for item in found["failed"]] == [("2", "io")]


def test_what_goes_with_a_cache_alone_and_what_is_neither_is_refused(answers, tmp_path):
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
