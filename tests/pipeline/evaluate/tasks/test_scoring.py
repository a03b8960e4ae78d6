"""Documents and numbers of four tasks of lmms-eval, by made-up replies and numbers that are computed by hand."""

import socket
from collections import Counter
from contextlib import suppress
from threading import Thread

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.tasks.process import TaskProcess
from tests import lmms_here  # noqa: F401 - skips this module without lmms-eval
from tests.pipeline.evaluate.tasks import homes

pytestmark = [pytest.mark.lmms, pytest.mark.slow]

LABELS = ("none@1", "gstep@0.25")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("v") / "hf"


def process_of(home, task, metric=None):
    return TaskProcess(task, metric, "llava_onevision", home, print)


def scored(home, task, *replies, metric=None):
    """The task's answer about replies by the number of their document, for one or two arms."""
    texts = ({str(number): text for number, text in of_arm.items()} for of_arm in replies)
    arms = dict(zip(LABELS, texts, strict=True))
    return process_of(home, task, metric).score(arms)


def means(answer):
    """The mean of the documents' scores, by arm."""
    return {label: sum(of_arm.values()) / len(of_arm) for label, of_arm in answer["scores"].items()}


def test_of_equal_documents_of_charades_the_last_one_counts(home):
    """Documents 2 and 8 are the same, and the task's own code keeps the last reply to them."""
    homes.write_charades(home)
    replies = {
        0: "The event happens in the 0.0 - 2.0 seconds.",  # is 0.0 to 1.0
        1: "It starts at 0.4 and ends at 1.3",  # a sentence of two numbers without a dash counts as one of them
        2: "0.0 - 1.1",  # right, but the eighth counts
        3: "0.4 - 1.3",
        4: "00:00 to 00:01",  # is 0.0 to 1.2; "to" is a dash to the task
        5: "",
        6: "1.0 - 0.0",  # turned round; is 0.0 to 1.3
        7: "5 - 9",
        8: "no idea",
    }
    answer = scored(home, "temporal_grounding_charades", replies, {**replies, 2: "no idea", 8: "0.0 - 1.1"})
    numbers = {"charades_sta_IOU@3": 50.0, "charades_sta_IOU@5": 50.0, "charades_sta_IOU@7": 37.5}
    total = 0.5 + 1.0 + 1.0 / 1.2 + 1.0 / 1.3
    assert answer["own"]["none@1"] == pytest.approx({**numbers, "charades_sta_mIOU": 100 * total / 8})
    numbers = {name: number + 12.5 for name, number in numbers.items()}
    assert answer["own"]["gstep@0.25"] == pytest.approx({**numbers, "charades_sta_mIOU": 100 * (total + 1) / 8})
    assert (answer["mean_over"], answer["percent"], answer["errors"]) == ("questions", True, [])
    assert [set(of_arm) for of_arm in answer["scores"].values()] == [set("01345678")] * 2
    assert means(answer) == {"none@1": 0.5, "gstep@0.25": 0.625}


def test_documents_that_show_pictures_or_several_videos_are_named_and_left_out(home):
    homes.write_mmsi_video(home)
    described = process_of(home, "mmsi_video").describe()
    two, picture = (
        ("other-media", f"it shows 2 ({what}), and not one video file") for what in ("a path", "Image, a path")
    )
    assert [one.fault for one in described.documents] == [None, two, None, picture, None, None, None]
    assert (described.metric, len(described.metrics)) == ("overall_accuracy", 14)
    assert described.documents[2].fields["type"] == "(Motion Understanding) Camera Motion"
    replies = {0: "A", 2: "The answer is C.", 4: "B", 5: "(B)", 6: "C"}
    answer = scored(home, "mmsi_video", replies, dict.fromkeys(replies, "A"), metric="motion_camera")
    own = answer["own"]["none@1"]
    assert own["overall_accuracy"] == 80.0 and own["motion_camera"] == 66.67 and own["planning"] == 100.0
    # A metric about one type is a mean over its documents, and the others do not count.
    assert (answer["mean_over"], answer["weights"]) == ("type", {"(Motion Understanding) Camera Motion": 1.0})
    assert answer["scores"]["none@1"] == {"2": 1.0, "4": 0.0, "6": 1.0}
    assert answer["scores"]["gstep@0.25"] == {"2": 0.0, "4": 1.0, "6": 0.0}


def test_replies_for_a_judge_are_counted_and_never_posted(home, monkeypatch):
    homes.write_tempcompass(home)
    calls = []

    def count_calls():
        with suppress(OSError):  # the server was closed
            while True:
                connection, address = server.accept()
                connection.close()
                calls.append(address)

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=count_calls, daemon=True).start()
        monkeypatch.setenv("OPENAI_API_URL", f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        right = {0: "Yes, it does.", 1: "no", 2: "yes", 3: "No way"}
        answer = scored(home, "tempcompass_yes_no", right, {**right, 1: "perhaps", 3: "the square rests"})
        assert not calls
    assert answer["judged"] == {"none@1": 0, "gstep@0.25": 2}
    own = answer["own"]
    assert own["none@1"] == {"avg_accuracy": 100.0, "direction_accuracy": 100.0}
    assert own["gstep@0.25"] == {"avg_accuracy": 50.0, "direction_accuracy": 50.0}
    assert means(answer) == {"none@1": 1.0, "gstep@0.25": 0.5}


def test_a_task_that_only_a_judge_scores_is_refused_before_anything_is_asked(home):
    homes.write_captioning(home)
    with pytest.raises(UsageError, match=r"lmms:tempcompass_captioning: its rule sends replies to a judge"):
        process_of(home, "tempcompass_captioning").describe()


def test_an_option_that_the_rule_draws_is_the_same_for_every_method(home):
    homes.write_nextqa(home)
    replies = dict.fromkeys(range(12), "no idea")
    answer = scored(home, "nextqa_mc_test", replies, replies)
    first, second = answer["scores"].values()
    assert first == second and len(Counter(first.values())) == 2
    assert answer["own"]["none@1"] == answer["own"]["gstep@0.25"]
