"""Questions: files, rows, choices and conversations, what is wrong with them, and columns nearly like known ones."""

import csv
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.language import Decoding
from pipeline.errors import QuestionsChanged, QuestionsError
from pipeline.generate.answers import ANSWER_SCHEMA, AnswersTable, commit_answers, write_answers_header
from pipeline.generate.conversation import load_messages, make_chat
from pipeline.generate.questions import AnswerMode, add_choices, parse_letter, read_given_questions, read_questions
from pipeline.generate.remaining import select_remaining_questions
from tests.builders.answers import request_about, tiny_cache, write_questions

WAY = AnswerMode(Decoding(max_new_tokens=16))
ROWS = [
    {"question_id": 7, "video_id": "a.mp4", "prompt": "What, then?", "topic": "x", "max_new_tokens": 5},
    {"question_id": "two", "video_id": ["a.mp4", "b.mp4"], "prompt": 'A "quoted"\nline', "choices": ["é", "b, c"]},
    {"question_id": "3", "video_id": "b.mp4", "prompt": "Why?", "temperature": 0.5, "system": "Be brief.", "seed": 4},
]


def read(path, rows, way=WAY, limit=None):
    return read_questions(str(write_questions(path, rows)), way, limit=limit).to_pylist()


@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_every_kind_of_file_says_the_same(tmp_path, kind):
    first, second, third = read(tmp_path / f"q{kind}", ROWS)
    assert (first["question_id"], first["video_ids"], first["prompt"]) == ("7", ["a.mp4"], "What, then?")
    assert (first["topic"], second["topic"]) == ("x", None)
    decoding = {"method": "generate", "system": None, "max_new_tokens": 5, "temperature": 0.0}
    assert json.loads(first["decoding"]) == decoding
    assert (second["video_ids"], second["choices"]) == (["a.mp4", "b.mp4"], ["é", "b, c"])
    assert second["prompt"] == 'A "quoted"\nline'
    assert json.loads(second["decoding"]) == {"method": "letter", "system": None}
    drawn = Decoding(max_new_tokens=16, temperature=0.5, seed=4)
    assert AnswerMode.parse(third["decoding"]) == AnswerMode(drawn, "generate", "Be brief.")


def test_gaps_as_pandas_writes_them_which_make_floats_of_whole_numbers(tmp_path):
    rows = [
        {"question_id": 1, "video_id": ["a"], "prompt": "p", "choices": ["x", "y"], "max_new_tokens": None},
        {"question_id": 2, "video_id": ["a", "b"], "prompt": "p", "choices": None, "max_new_tokens": 3.0},
    ]
    first, second = read(tmp_path / "q.parquet", rows)
    assert (first["question_id"], first["choices"], first["video_ids"]) == ("1", ["x", "y"], ["a"])
    assert second["choices"] is None and json.loads(second["decoding"])["max_new_tokens"] == 3
    (tmp_path / "q.csv").write_text("question_id,video_id,prompt,max_new_tokens,top_k\n1,a,p,3.0,\n2,a,p,,4.0\n")
    first, second = read_questions(str(tmp_path / "q.csv"), AnswerMode(Decoding(temperature=1.0))).to_pylist()
    assert json.loads(first["decoding"])["max_new_tokens"] == 3 and json.loads(second["decoding"])["top_k"] == 4


def test_gaps_in_dicts_of_pandas_are_nan_in_every_column():
    whole = {
        **GOOD, "choices": ["x", "y"], "answer": "x", "system": "Be brief.", "max_new_tokens": 3, "temperature": 1.0,
        "top_p": 0.9, "top_k": 4, "seed": 5, "topic": "dogs",
    }  # fmt: skip
    bare = {**GOOD, "question_id": 2}
    first, second = read_given_questions(pd.DataFrame([whole, bare]).to_dict("records"), WAY).to_pylist()
    assert (first, second) == tuple(read_given_questions([whole, bare], WAY).to_pylist())
    with pytest.raises(QuestionsError, match=r"row 0: every row needs .*; prompt is missing"):
        read_given_questions([{**GOOD, "prompt": float("nan")}], WAY)


def test_questions_draw_each_for_itself_and_by_the_seed(tmp_path):
    rows = [{"question_id": i, "video_id": "v", "prompt": "p"} for i in range(20)]

    def seeds(seed):
        drawn = read(tmp_path / "q.jsonl", rows, AnswerMode(Decoding(temperature=1.0, seed=seed)))
        return [json.loads(row["decoding"])["seed"] for row in drawn]

    assert len(set(seeds(0))) == 20
    assert seeds(0) == seeds(0) and not set(seeds(0)) & set(seeds(1))


GOOD = {"question_id": 1, "video_id": "v", "prompt": "p"}


WRONG = [
    ({"question_id": None}, "question_id must be text or a whole number, got None"),
    *(({"video_id": given}, "video_id must be a video's id") for given in ("", [], ["v", True])),
    ({"choices": "yes or no"}, "choices must be a list of texts"),
    ({"choices": ["x"]}, "at least two"),
    ({"choices": [str(i) for i in range(27)]}, "there are 26 letters: use --choices loglikelihood"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"temperature": 10**400}, "temperature must be a number, got one of 401 digits"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
    ({"top_p": 2}, "top_p must be in (0, 1]"),
    ({"seed": True}, "seed must be a whole number"),
    *(({name: "\ud800"}, "not valid text") for name in ("prompt", "question_id", "system", "answer")),
    *(({"answer": a}, f"answer must be text or a number, got {a!r}") for a in (True, ["B"], {"right": "B"})),
]
MISPLACED = {"question_id": 1, "video": "v", "prompt": "p", "topic": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        *(({**GOOD, **change}, message) for change, message in WRONG),
        (MISPLACED, "needs question_id, video_id and prompt (or messages); video_id (did you mean video?) is missing"),
        (MISPLACED, "the row has: question_id, video, prompt, topic"),
        ([1], "expected an object with question_id, video_id and prompt (or messages), got list"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_place(tmp_path, row, message):
    with pytest.raises(QuestionsError) as error:
        read(tmp_path / "q.jsonl", [{**GOOD, "question_id": "fine"}, row])
    assert f"{tmp_path / 'q.jsonl'}, line 2: " in str(error.value) and message in str(error.value)


def line(question_id):
    return json.dumps({**GOOD, "question_id": question_id}).encode() + b"\n"


HEADER = b"question_id,video_id,prompt\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.txt", b"", "a file named .csv, .jsonl, .parquet"),
        ("q.parquet", b"PAR", "cannot be read as questions"),
        ("q.jsonl", b"{", "line 1: not JSON"),
        ("q.jsonl", b"\n", "there is no question in it"),
        ("q.csv", HEADER + b"1,v,Who, then?", "line 2: more cells than the header names; quote a text"),
        ("q.csv", HEADER + b'1,v,"What', "line 2: unexpected end of data"),
        ("q.csv", b"question_id,video_id,prompt,answer,answer\n1,v,p,A,B", "line 1: two columns have the name answer"),
        ("q.jsonl", line(1) + b"1" * 5000, "line 2: not JSON"),
        ("q.jsonl", b"".join(map(line, (1, "1", 2, 2, 3))), r"2 question_ids repeat, e\.g\. '1', '2'"),
        ("q.csv", None, r"q.csv: cannot be read: No such file"),
    ],
    ids=range(10),
)
def test_a_file_or_a_line_that_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(QuestionsError, match=message):
        read_questions(str(tmp_path / name), WAY)


def test_more_choices_than_letters_have_their_texts_scored(tmp_path):
    many = {**GOOD, "choices": [str(i) for i in range(27)]}
    assert len(read(tmp_path / "q.jsonl", [many], AnswerMode(Decoding(), "loglikelihood"))[0]["choices"]) == 27


def test_lists_in_a_csv(tmp_path):
    (tmp_path / "q.csv").write_text('question_id,video_id,prompt\n1,"[ ""a"", ""b""]",p\n2,"[a] b.mp4",p\n3,[3],p\n')
    ids = read_questions(str(tmp_path / "q.csv"), WAY)["video_ids"].to_pylist()
    assert ids == [["a", "b"], ["[a] b.mp4"], ["[3]"]]
    (tmp_path / "q.csv").write_text("question_id,video_id,prompt,choices\n1,a,p," + "[" * 100_000 + "\n")
    with pytest.raises(QuestionsError, match="choices must be a list of texts"):
        read_questions(str(tmp_path / "q.csv"), WAY)


def targets(path, *answers):
    """What the file of a kind says is right, a question an answer."""
    rows = [{**GOOD, "question_id": i, "answer": answer} for i, answer in enumerate(answers)]
    return [row["target"] for row in read(path, rows)]


def test_the_right_answer_is_kept_as_text_and_is_not_carried_along_twice(tmp_path):
    assert targets(tmp_path / "q.jsonl", "B", "a dog, or two", " B ", 3, -1, 0.5, None, "", " ") == [
        "B", "a dog, or two", " B ", "3", "-1", "0.5", None, None, None
    ]  # fmt: skip
    assert targets(tmp_path / "q.csv", 3, 12345678) == targets(tmp_path / "q.parquet", 3, 12345678) == ["3", "12345678"]
    assert targets(tmp_path / "gaps.parquet", 3.0, None, float("nan")) == ["3", None, None]  # as pandas writes gaps
    numbers = [2.5, 1234567.0, 0.1234567, 1e20]
    texts = targets(tmp_path / "q.jsonl", *numbers)
    assert list(map(float, texts)) == numbers and "e" not in "".join(texts)
    (row,) = read(tmp_path / "q.jsonl", [{**GOOD, "answer": "B", "topic": "x"}])
    assert row["topic"] == "x" and "answer" not in row
    assert "answer" not in row["decoding"]


@pytest.mark.parametrize("kind", [list, iter, pa.Table.from_pylist])
def test_questions_at_hand_are_those_of_a_file_of_which_a_limit_takes_the_first(tmp_path, kind):
    rows = [{"question_id": str(i), "video_id": "a", "prompt": "p", "choices": ["x", "y"]} for i in range(3)]
    given = read_given_questions(kind(rows), WAY, limit=2).to_pylist()
    assert given == read(tmp_path / "q.jsonl", rows, limit=2) and [row["question_id"] for row in given] == ["0", "1"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "questions: there is no question in it"),
        ([{"question_id": 1, "video_id": "a"}], "questions, row 0: .* prompt is missing; the row has: question_id, v"),
        (["What?"], "questions, row 0: expected a dict with question_id, video_id and prompt .or messages., got str"),
        ("What?", "questions, row 0: expected a dict"),
        ({"question_id": 1}, "expected a list of dicts or a table"),
    ],
)
def test_what_is_no_list_of_questions_is_refused_by_name(given, said):
    with pytest.raises(QuestionsError, match=said):
        read_given_questions(given, WAY)


def test_letters_are_put_as_lmms_eval_puts_them():
    assert add_choices("Which?", ["a dog", "a cat"]) == (
        "Which?\nA. a dog\nB. a cat\nAnswer with the option's letter from the given choices directly."
    )


LABELED = (
    *(["A. a dog", "B. a cat"], ["(A) a dog", "(B) a cat"], ["A) a dog", "B) a cat"], ["A: a dog", "B: a cat"]),
    *(["a. a dog", "b. a cat"], ["(a) a dog", "(b) a cat"], [" A.\ta dog", "(B)a cat"]),
    ["A\u3001a dog", "B\uff0ea cat"],
)


@pytest.mark.parametrize("choices", LABELED)
def test_choices_that_carry_their_letters_get_no_second_ones(choices):
    assert add_choices("Which?", choices) == add_choices("Which?", ["a dog", "a cat"])
    replies = ("A", "A. a dog", "(A) a dog", "a dog", "A dog.", choices[0], choices[0].strip().lower())
    assert [parse_letter(reply, choices) for reply in replies] == [0] * len(replies)


@pytest.mark.parametrize(
    "choices",
    [
        ["A. Lincoln", "G. Bush"],  # initials
        ["A. a dog", "a cat"],  # of some alone
        ["B. a dog", "A. a cat"],
        ["A.D.", "B.C."],
        ["A minor", "B minor", "C minor"],
        ["A", "B"],
        ["1. a dog", "2. a cat"],
        ["A.", "B."],  # letters in the video, say
        ["A:B", "B:A"],
        ["A - B", "B - C"],
    ],
)
def test_what_is_no_choices_letter_stays(choices):
    letters = (f"{letter}. {text}\n" for letter, text in zip("ABC", choices, strict=False))
    assert add_choices("Which?", choices).startswith("Which?\n" + "".join(letters))


CHOICES = ["a dog", "a cat", "a cow."]


@pytest.mark.parametrize(
    ("choice", "answers"),
    [
        (1, ("B", " (B)", "B. a cat", "**B**", "B\nbecause", "a cat", "A Cat.", "I think B fits", "the answer is b")),
        (2, ("The answer is C.", "the correct option is: (C)", "A cow.", "a cow", "Answer: (c).")),
        (None, ("A man walks", "I do not know", "The answer is a car", "E", "B or C", "")),  # A and I are words
    ],
)
def test_the_letter_of_a_generated_answer(choice, answers):
    assert {answer: parse_letter(answer, CHOICES) for answer in answers} == dict.fromkeys(answers, choice)
    assert parse_letter("Well, I do not know", [f"choice {i}" for i in range(9)]) is None


FORMS = ("**Answer:** {}", "The answer is **({})**", 'The answer is "{}".', "Answer: [{}]", r"\boxed{{{}}}", "{} - x")
WITHOUT_SPACES = ("答案是{}。", "选{}", "{}是正确的", "正解は{}です", "정답은 {}입니다")


@pytest.mark.parametrize("form", [*FORMS, *WITHOUT_SPACES])
def test_a_letter_that_is_a_word_too_is_read_in_every_form_that_the_others_are(form):
    assert [parse_letter(form.format(letter), CHOICES) for letter in "ABC"] == [0, 1, 2]
    assert form in FORMS or parse_letter(form.format("A和B"), CHOICES) is None
    assert parse_letter("Béla, ÉB, B2 und CB", CHOICES) is None  # of these words it is a part


def test_what_an_answer_thinks_names_no_choice():
    thought = "The dog is first. Option A? No, the answer is B."
    for answer in (f"{thought}\n</think>\n\nC", f"<think>{thought}</think> a cow."):
        assert parse_letter(answer, CHOICES) == 2


@pytest.mark.parametrize("form", ["{} and {}", "{} or {}", "{}, {}", "{}/{}", "The answer is ({}) or ({})", "({}), {}"])
def test_several_letters_name_no_choice(form):
    assert {parse_letter(form.format(*letters), CHOICES) for letters in ("AB", "BC", "CA")} == {None}


def test_a_choice_that_begins_like_another_letter_is_its_text():
    times = ["11 P.M.", "A.M.", "B, then A", "A, then B"]
    assert [parse_letter(text, times) for text in times] == [0, 1, 2, 3]
    assert [parse_letter(text, ["B", "A"]) for text in ("A", "B.", "(B)")] == [0, 1, 1]  # letters are asked for
    assert [parse_letter(text, ["7", "b"]) for text in ("7", "b")] == [0, 1]


NEAR = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens", "max_gen_toks", "maxNewTokens", "max_new_tokn"),
    "temperature": ("TEMPERATURE", "temprature", "temperatures"),
    "choices": ("option", "options", "Choices", "chioces", "candidates", "answer_choices"),
    "messages": ("message", "mesages", "conversations"),
    "system": ("sytem", "system_prompt", "systemMessage"),
    "answer": ("answers", "anwser"),
    "seed": ("seeds",),
    "top_p": ("topP", "top-p"),
    "top_k": ("Top_K",),
}
OWN = (
    *("category", "answer_id", "prompt_id", "option_order", "topics", "split", "speed", "question_type", "question"),
    *("query", "duration_s", "text", "answer_a", "answer_1", "prompt2", "system_id", "n_options", "message_count"),
    *("temperature_c", "top_n", "tops", "need", "seen", "tokens", "status", "stop_s", "options_shuffled", "history"),
    *("n", "max_points", "id", "video", "url", "systolic", "тема"),
)
REFUSED = [
    *(
        ({**GOOD, name: "x"}, f"no column {name} is read (did you mean {right}?): rename it")
        for right, names in NEAR.items()
        for name in names
    ),
    ({"question_id": 1, "video_id": "v", "question": "p"}, "no column question is read (did you mean prompt?)"),
    ({"Question_ID": 1, "video_id": "v", "prompt": "p"}, "Question_ID is read (did you mean question_id?)"),
    ({"question_id": 1, "video_ids": ["v"], "prompt": "p"}, "video_ids is read (did you mean video_id?)"),
    ({"question_id": 1, "video_id": "v", "conversations": []}, "prompt is missing"),  # an empty cell
    ({"question_id": 1, "video_id": "v", "conversations": [1]}, "(did you mean messages?)"),
    *(
        ({**GOOD, name: value}, f"{name} is a setting that questions do not have here (they have max_new_tokens,")
        for name, value in (
            *(("stop", "\n"), ("stop", ["\n", "."]), ("stop_token_ids", [1]), ("until", ["\n"]), ("num_beams", 2)),
            *(("do_sample", True), ("min_p", 0.1), ("repetition_penalty", 1.1), ("frequencyPenalty", 1)),
            ("response_format", {"type": "json"}),
        )
    ),
]


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_names_nearly_those_of_columns_and_settings_of_other_tools_are_refused(row, message):
    with pytest.raises(QuestionsError) as error:
        read_given_questions([{**GOOD, "question_id": 0}, row], WAY)
    assert "questions, row 1: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", OWN)
def test_columns_of_the_users_own_are_carried_along(name):
    (carried,) = read_given_questions([{**GOOD, name: "x", "stop": 12.5}], WAY).to_pylist()
    assert carried[f"question_{name}" if name in ANSWER_SCHEMA.names else name] == "x"
    assert carried["stop"] == 12.5  # the time at which a part of a video stops is no setting


def test_a_right_name_makes_near_ones_the_users_own():
    """A file may have the bare question beside the prompt, or the limit of another tool beside the one here."""
    row = {**GOOD, "max_new_tokens": 3, "max_tokens": 9, "choices": ["a", "b"], "option": "x", "question": "q"}
    (read,) = read_given_questions([row], WAY).to_pylist()
    assert (read["max_tokens"], read["option"], read["question"]) == (9, "x", "q")
    with pytest.raises(QuestionsError, match=r"row 1: no column max_tokens .* max_new_tokens"):  # row by row
        read_given_questions([row, {**GOOD, "question_id": 2, "max_tokens": 9}], WAY)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".csv"])
def test_files_are_refused_with_the_row_and_empty_cells_are_no_columns(tmp_path, kind):
    rows = [{**GOOD, "max_tokens": None, "note": "x"}, {**GOOD, "question_id": 2, "max_tokens": 5, "note": "y"}]
    path = str(write_questions(tmp_path / f"q{kind}", rows))
    with pytest.raises(QuestionsError, match=rf"q\{kind}, (line|row) \d: no column max_tokens is read"):
        read_questions(path, WAY)
    table = read_questions(path, WAY, limit=1)
    assert table["note"].to_pylist() == ["x"]
    gaps = [{**GOOD, "Temperature": value} for value in (None, "", float("nan"), [])]
    for number, row in enumerate(gaps):
        (tmp_path / "g.jsonl").write_text(json.dumps({**row, "question_id": number}))
        assert len(read_questions(str(tmp_path / "g.jsonl"), WAY)) == 1


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


def read_row(messages, **more):
    (row,) = read_given_questions([{**BASE, "messages": messages, **more}], WAY).to_pylist()
    return row


def parsed(messages, **more):
    return load_messages(read_row(messages, **more)["conversation"])


def test_texts_become_parts_and_the_video_stands_at_the_start_of_the_first_user_message():
    row = read_row([SYSTEM, *TALK])
    assert row["prompt"] == "What does it do?"
    explicit = [user([VIDEO, text("Who is it?")]), assistant([text("A dog.")]), user([text("What does it do?")])]
    assert load_messages(row["conversation"]) == [SYSTEM | {"content": [text("Be brief.")]}, *explicit]
    assert parsed(TALK, video_id=["a", "b"])[0]["content"] == [VIDEO, VIDEO, text("Who is it?")]
    assert read_row(explicit) == read_row(TALK)  # however it is written, it is the same conversation


def test_a_video_stands_where_a_part_says():
    last = [*TALK[:2], user([text("And"), VIDEO, text("here?")])]
    assert parsed(last) == [user([text("Who is it?")]), assistant([text("A dog.")]), last[2]]
    assert read_row(last)["prompt"] == "And\nhere?"


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".parquet"])
def test_every_kind_of_file_has_conversations_beside_prompts(tmp_path, kind):
    rows = [{**BASE, "messages": TALK, "prompt": None}, {"question_id": 2, "video_id": "a", "prompt": "Why?"}]
    path = write_questions(tmp_path / f"q{kind}", rows)
    if kind == ".csv":
        with path.open() as file:
            assert json.loads(next(csv.DictReader(file))["messages"]) == TALK
    table = read_questions(str(path), WAY)
    assert table["prompt"].to_pylist() == ["What does it do?", "Why?"]
    assert table["conversation"].to_pylist() == [read_row(TALK)["conversation"], None]
    assert "messages" not in table.column_names


def test_parts_in_parquet_have_nulls_for_what_others_have(tmp_path):
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("video", pa.string())])
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(part))]))
    messages = [user([text("Look:"), VIDEO]), assistant([text("A dog.")]), user([text("Why?")])]
    table = pa.table({"question_id": [1], "video_id": ["a"], "messages": pa.array([messages], kind)})
    pq.write_table(table, tmp_path / "q.parquet")
    (row,) = read_questions(str(tmp_path / "q.parquet"), WAY).to_pylist()
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
        read_given_questions([{**BASE, "question_id": 0, "messages": TALK}, {**BASE, "messages": messages}], WAY)
    assert str(error.value).startswith("questions, row 1: ") and message in str(error.value)


def test_a_row_has_a_prompt_or_messages_and_one_system_message():
    own = [SYSTEM, *TALK]
    for messages, more, message in (
        (TALK, {"prompt": "Why?"}, "a row has prompt or messages, and not both: the last message is the prompt"),
        (own, {"system": "Be long."}, "both messages and the column system have a system message"),
        (None, {}, "prompt is missing"),
    ):
        with pytest.raises(QuestionsError, match=message):
            read_row(messages, **more)
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
