"""The column messages: what it may hold, where its video stands, and that a changed turn is a changed question."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.language import Decoding
from pipeline.errors import QuestionsChanged, QuestionsError
from pipeline.generate.answers import AnswersTable, commit_answers, write_answers_header
from pipeline.generate.conversation import load_messages, make_chat
from pipeline.generate.questions import AnswerMode, read_given_questions, read_questions
from pipeline.generate.remaining import select_remaining_questions
from tests.builders.answers import request_about, tiny_cache, write_questions

MODE = AnswerMode(Decoding(max_new_tokens=8))
BASE = {"question_id": 1, "video_id": "a"}
VIDEO = {"type": "video"}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [user("Who is it?"), assistant("A dog."), user("What does it do?")]


def read(messages, **more):
    (row,) = read_given_questions([{**BASE, "messages": messages, **more}], MODE).to_pylist()
    return row


def parsed(messages, **more):
    return load_messages(read(messages, **more)["conversation"])


def test_texts_become_parts_and_the_video_stands_at_the_start_of_the_first_user_message():
    row = read([SYSTEM, *TALK])
    assert row["prompt"] == "What does it do?"
    explicit = [user([VIDEO, text("Who is it?")]), assistant([text("A dog.")]), user([text("What does it do?")])]
    assert load_messages(row["conversation"]) == [SYSTEM | {"content": [text("Be brief.")]}, *explicit]
    assert parsed(TALK, video_id=["a", "b"])[0]["content"] == [VIDEO, VIDEO, text("Who is it?")]
    assert read(explicit) == read(TALK)  # however it is written, it is the same conversation


def test_a_video_stands_where_a_part_says():
    last = [*TALK[:2], user([text("And"), VIDEO, text("here?")])]
    assert parsed(last) == [user([text("Who is it?")]), assistant([text("A dog.")]), last[2]]
    assert read(last)["prompt"] == "And\nhere?"


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_every_kind_of_file_has_conversations_beside_prompts(tmp_path, kind):
    rows = [{**BASE, "messages": TALK, "prompt": None}, {"question_id": 2, "video_id": "a", "prompt": "Why?"}]
    path = write_questions(tmp_path / f"q{kind}", rows)
    if kind == ".csv":
        with path.open() as file:
            assert json.loads(next(csv.DictReader(file))["messages"]) == TALK
    table = read_questions(str(path), MODE)
    assert table["prompt"].to_pylist() == ["What does it do?", "Why?"]
    assert table["conversation"].to_pylist() == [read(TALK)["conversation"], None]
    assert "messages" not in table.column_names


def test_parts_in_parquet_have_nulls_for_what_others_have(tmp_path):
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("video", pa.string())])
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(part))]))
    messages = [user([text("Look:"), VIDEO]), assistant([text("A dog.")]), user([text("Why?")])]
    table = pa.table({"question_id": [1], "video_id": ["a"], "messages": pa.array([messages], kind)})
    pq.write_table(table, tmp_path / "q.parquet")
    (row,) = read_questions(str(tmp_path / "q.parquet"), MODE).to_pylist()
    assert load_messages(row["conversation"]) == messages


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        *((given, "messages must be a list like [{") for given in ([], "Who?", {"role": "user", "content": "Who?"})),
        (["Who?"], "message 1 must be an object like"),
        ([{"role": "user"}], "message 1: content must be a text or a list of parts that is not empty, got None"),
        ([*TALK[:2], {"role": "human", "content": "Who?"}], "message 3: role must be system, user, assistant, got 'hu"),
        *(([{"role": role, "content": "x"}, *TALK], "message 1: role must be") for role in ("tool", "developer")),
        (TALK[:2], "the last message must be of the role user, which the model answers, got assistant"),
        ([*TALK[:2], SYSTEM, TALK[2]], "message 3: a message of the role system must be the"),
        ([user("Who?"), assistant(" "), user("Why?")], "message 2: content must be a text that is not blank, got ' '"),
        ([user(["Who?"])], "message 1: a part must be an object like"),
        ([user([VIDEO])], "the last message needs a text, the question that the model answers"),
        ([user([VIDEO, VIDEO, text("Who?")])], "2 parts of the type video, and video_id names 1 videos: each needs"),
        ([user([{"type": "image"}, text("Who?")])], "message 1: a part of the type 'image': known are text and video"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "a part of the type 'image_url'"),
        ([user([{"type": "video_url", "video_url": {"url": "x"}}])], '({"type": "video"}, where a video of video_id'),
        ([user([VIDEO | {"video": "a.mp4"}, text("Who?")])], "video is not read: leave it out; the video is named"),
        ([user("Who?") | {"name": "Ann"}], "message 1: name is not read: leave it out"),
        ([user([text("Who?") | {"cache_control": {}}])], "message 1: cache_control is not read: leave it out"),
        ([user("Who?"), assistant([VIDEO]), user("Why?")], "message 2: a video stands in a message"),
        ([user("\ud800")], "not valid text"),
    ],
)
def test_what_is_wrong_with_messages_is_said_with_row_and_message(messages, message):
    with pytest.raises(QuestionsError) as error:
        read_given_questions([{**BASE, "question_id": 0, "messages": TALK}, {**BASE, "messages": messages}], MODE)
    assert str(error.value).startswith("questions, row 1: ") and message in str(error.value)


def test_a_row_has_a_prompt_or_messages_and_one_system_message():
    own = [SYSTEM, *TALK]
    for messages, more, message in (
        (TALK, {"prompt": "Why?"}, "a row has prompt or messages, and not both: the last message is the prompt"),
        (own, {"system": "Be long."}, "both messages and the column system have a system message"),
        (None, {}, "prompt is missing"),
    ):
        with pytest.raises(QuestionsError, match=message):
            read(messages, **more)
    flag = AnswerMode(Decoding(), system="Be long.")
    rows = [{**BASE, "messages": own}, {**BASE, "question_id": 2, "messages": TALK}]
    modes = [json.loads(row["decoding"]) for row in read_given_questions(rows, flag).to_pylist()]
    assert [mode["system"] for mode in modes] == [None, "Be long."]


def test_what_follows_the_question_stands_behind_the_last_text_and_a_system_message_first():
    messages = [*TALK[:2], user([text("Which"), text("one?"), VIDEO])]
    first = [SYSTEM | {"content": [text("Be brief.")]}, *parsed(messages)[:2]]
    asked = user([text("Which"), text("one?\nA. a dog"), VIDEO])
    assert make_chat(parsed(messages), "Be brief.", "\nA. a dog") == [*first, asked]
    assert make_chat(parsed(messages), None, "") == parsed(messages)


def test_a_changed_turn_is_a_changed_question_and_the_same_conversation_is_not_asked_again(tmp_path):
    tiny_cache(tmp_path / "c")

    def remaining(job):
        live = AnswersTable(job.store).select_live_answers(job.questions, [""])
        return select_remaining_questions(job.store, live, job.questions, {"": None}, job.config, {"a"})

    def request(messages=None, **more):
        return request_about(tmp_path / "c", [{**BASE, "messages": messages, **more}])

    job = request(TALK)
    write_answers_header(job.store, job.identity)
    (question,) = job.questions.to_pylist()
    commit_answers(job.store, "run", 0, [{**question, "status": "ok", "attempts": 1, "answer": "It runs."}])
    explicit = [user([VIDEO, text("Who is it?")]), *TALK[1:]]
    assert remaining(request(TALK)) == remaining(request(explicit)) == []
    for changed, what in (
        ([user("Who is she?"), *TALK[1:]], "1: message 1 was .*Who is it.*, is .*Who is she"),
        ([*TALK[:2], user("Why?")], "1: prompt was 'What does it do.', is 'Why.'"),
        ([*TALK[:2], user([text("What does it do?"), VIDEO])], "1: message 1 was .*video.*, is .*Who is it"),
        (None, "1: message 1 was .*Who is it.*, is None"),
    ):
        asked = request(prompt="What does it do?") if changed is None else request(changed)
        with pytest.raises(QuestionsChanged, match=what):
            remaining(asked)
