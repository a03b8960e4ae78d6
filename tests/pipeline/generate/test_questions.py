"""Questions: the three kinds of file say the same, what is wrong with a row is said with its place; choices."""

import json

import pyarrow as pa
import pytest

from gstep.language import Decoding
from pipeline.errors import QuestionsError
from pipeline.generate.questions import AnswerMode, add_choices, parse_letter, read_given_questions, read_questions
from tests.pipeline.asking import write_questions

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
    assert json.loads(first["decoding"]) == {
        "method": "generate", "system": None, "max_new_tokens": 5, "temperature": 0.0
    }  # fmt: skip
    assert (second["video_ids"], second["choices"], second["prompt"]) == (
        ["a.mp4", "b.mp4"], ["é", "b, c"], 'A "quoted"\nline'
    )  # fmt: skip
    assert json.loads(second["decoding"]) == {"method": "letter", "system": None}
    decoding = json.loads(third["decoding"])
    assert decoding["system"] == "Be brief."
    drawn = Decoding(max_new_tokens=16, temperature=0.5, seed=4)
    assert AnswerMode.parse(third["decoding"]) == AnswerMode(drawn, "generate", "Be brief.")


def test_parquet_with_gaps_as_pandas_writes_them(tmp_path):
    rows = [
        {"question_id": 1, "video_id": ["a"], "prompt": "p", "choices": ["x", "y"], "max_new_tokens": None},
        {"question_id": 2, "video_id": ["a", "b"], "prompt": "p", "choices": None, "max_new_tokens": 3.0},
    ]
    first, second = read(tmp_path / "q.parquet", rows)
    assert (first["question_id"], first["choices"], first["video_ids"]) == ("1", ["x", "y"], ["a"])
    assert second["choices"] is None and json.loads(second["decoding"])["max_new_tokens"] == 3


def test_a_csv_of_pandas_has_points_in_whole_numbers_where_a_column_has_gaps(tmp_path):
    (tmp_path / "q.csv").write_text("question_id,video_id,prompt,max_new_tokens,top_k\n1,a,p,3.0,\n2,a,p,,4.0\n")
    first, second = read_questions(str(tmp_path / "q.csv"), AnswerMode(Decoding(temperature=1.0))).to_pylist()
    assert json.loads(first["decoding"])["max_new_tokens"] == 3 and json.loads(second["decoding"])["top_k"] == 4


def test_a_limit_takes_the_first(tmp_path):
    assert [row["question_id"] for row in read(tmp_path / "q.jsonl", ROWS, limit=2)] == ["7", "two"]


def test_questions_draw_each_for_itself_and_by_the_seed(tmp_path):
    rows = [{"question_id": i, "video_id": "v", "prompt": "p"} for i in range(20)]

    def seeds(seed):
        drawn = read(tmp_path / "q.jsonl", rows, AnswerMode(Decoding(temperature=1.0, seed=seed)))
        return [json.loads(row["decoding"])["seed"] for row in drawn]

    assert len(set(seeds(0))) == 20
    assert seeds(0) == seeds(0) and not set(seeds(0)) & set(seeds(1))


GOOD = {"question_id": 1, "video_id": "v", "prompt": "p"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "question_id": None}, "question_id must be text or a whole number, got None"),
        ({**GOOD, "question_id": " "}, "question_id must be text"),
        ({**GOOD, "question_id": 1.5}, "question_id must be text"),
        ({**GOOD, "video_id": ""}, "video_id must be a video's id"),
        ({**GOOD, "video_id": []}, "video_id must be a video's id"),
        ({**GOOD, "video_id": ["v", 3]}, "video_id must be a video's id"),
        (
            {"question_id": 1, "video": "v", "prompt": "p", "topic": 1},
            "every row needs question_id, video_id and prompt; video_id (did you mean video?) is missing; "
            "the row has: question_id, video, prompt, topic",
        ),
        ({**GOOD, "choices": "yes or no"}, "choices must be a list of texts"),
        ({**GOOD, "choices": ["x"]}, "at least two"),
        ({**GOOD, "choices": ["x", ""]}, "choices must be a list of texts"),
        ({**GOOD, "choices": [str(i) for i in range(27)]}, "there are 26 letters: use --choices loglikelihood"),
        ({**GOOD, "temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({**GOOD, "max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ({**GOOD, "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({**GOOD, "top_p": 2}, "top_p must be in (0, 1]"),
        ({**GOOD, "seed": True}, "seed must be a whole number"),
        ({**GOOD, "system": 3}, "system must be text"),
        ({**GOOD, "prompt": "\ud800"}, "not valid text"),
        ({**GOOD, "question_id": "\ud800"}, "not valid text"),
        ({**GOOD, "system": "\ud800"}, "not valid text"),
        ({**GOOD, "temperature": 10**400}, "temperature must be a number, got one of 401 digits"),
        ([1], "expected an object with question_id, video_id and prompt, got list"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_place(tmp_path, row, message):
    with pytest.raises(QuestionsError) as error:
        read(tmp_path / "q.jsonl", [{**GOOD, "question_id": "fine"}, row])
    assert f"{tmp_path / 'q.jsonl'}, line 2: " in str(error.value) and message in str(error.value)


def test_many_choices_are_fine_where_their_texts_are_scored(tmp_path):
    row = {**GOOD, "choices": [str(i) for i in range(27)]}
    assert len(read(tmp_path / "q.jsonl", [row], AnswerMode(Decoding(), "loglikelihood"))[0]["choices"]) == 27


def test_a_file_that_is_none(tmp_path):
    for name, content, message in (
        ("q.txt", b"", "a file named .csv, .jsonl, .parquet"),
        ("q.parquet", b"PAR", "cannot be read as questions"),
        ("q.jsonl", b"{", "line 1: not JSON"),
        ("q.jsonl", b"\xff\xfe", "cannot be read as questions"),
        ("q.jsonl", b"\n", "there is no question in it"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(QuestionsError, match=message):
            read_questions(str(tmp_path / name), WAY)
    with pytest.raises(QuestionsError, match=r"none.csv: cannot be read: No such file"):
        read_questions(str(tmp_path / "none.csv"), WAY)
    with pytest.raises(QuestionsError, match=r"2 question_ids repeat, e\.g\. '1', '2'"):
        read(tmp_path / "q.jsonl", [{**GOOD, "question_id": i} for i in (1, "1", 2, 2, 3)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.csv", "1,v,Who, then?", "line 2: more cells than the header names; quote a text that holds commas"),
        ("q.csv", '1,v,"What', "line 2: unexpected end of data"),
        ("q.jsonl", "[" * 100_000, "line 2: not JSON"),
        ("q.jsonl", "1" * 5000, "line 2: not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, name, content, message):
    header = "question_id,video_id,prompt" if name == "q.csv" else json.dumps(GOOD)
    (tmp_path / name).write_text(f"{header}\n{content}\n")
    with pytest.raises(QuestionsError, match=message):
        read_questions(str(tmp_path / name), WAY)


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
    (row,) = read(tmp_path / "q.jsonl", [{**GOOD, "answer": "B", "topic": "x"}])
    assert row["topic"] == "x" and "answer" not in row
    assert "answer" not in row["decoding"]


def test_whole_numbers_are_the_same_answer_from_every_kind_of_file(tmp_path):
    assert targets(tmp_path / "q.csv", 3, 12345678) == ["3", "12345678"]
    assert targets(tmp_path / "q.parquet", 3, 12345678) == ["3", "12345678"]
    assert targets(tmp_path / "gaps.parquet", 3.0, None) == ["3", None]  # as pandas writes a column with gaps


@pytest.mark.parametrize("number", [2.5, 1234567.0, 0.1234567, 1e20])
def test_a_number_keeps_its_digits(tmp_path, number):
    (target,) = targets(tmp_path / "q.jsonl", number)
    assert float(target) == number and "e" not in target


def test_what_is_not_a_number_is_no_answer(tmp_path):
    """As a column of floats may hold where there is none."""
    assert targets(tmp_path / "q.parquet", 1.0, float("nan")) == ["1", None]


@pytest.mark.parametrize("answer", [True, ["B"], {"right": "B"}])
def test_an_answer_that_is_neither_text_nor_a_number_is_refused(tmp_path, answer):
    with pytest.raises(QuestionsError) as error:
        targets(tmp_path / "q.jsonl", "fine", answer)
    assert f"line 2: answer must be text or a number, got {answer!r}" in str(error.value)


def test_an_answer_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(QuestionsError, match="line 1: not valid text"):
        targets(tmp_path / "q.jsonl", "\ud800")


@pytest.mark.parametrize("kind", [list, iter, pa.Table.from_pylist])
def test_questions_at_hand_are_those_of_a_file(tmp_path, kind):
    rows = [{"question_id": str(i), "video_id": "a", "prompt": "p", "choices": ["x", "y"]} for i in range(3)]
    assert read_given_questions(kind(rows), WAY, limit=2).to_pylist() == read(tmp_path / "q.jsonl", rows, limit=2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "questions: there is no question in it"),
        ([{"question_id": 1, "video_id": "a"}], "questions, row 0: .* prompt is missing; the row has: question_id, v"),
        ([{"question_id": 1, "video_id": "a", "prompt": " "}], "questions, row 0: prompt must be text"),
        (["What?"], "questions, row 0: expected a dict with question_id, video_id and prompt, got str"),
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


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("B", 1),
        (" (B)", 1),
        ("B. a cat", 1),
        ("**B**", 1),
        ("B\nbecause", 1),
        ("The answer is C.", 2),
        ("the correct option is: (C)", 2),
        ("a cat", 1),
        ("A Cat.", 1),
        ("A cow.", 2),
        ("a cow", 2),
        ("I think B fits", 1),
        ("A man walks", None),  # an article
        ("I do not know", None),
        ("The answer is a car", None),
        ("the answer is b", 1),
        ("Answer: (c).", 2),
        ("E", None),  # no such choice
        ("B or C", None),
        ("", None),
    ],
)
def test_the_letter_of_a_generated_answer(answer, choice):
    assert parse_letter(answer, ["a dog", "a cat", "a cow."]) == choice


def test_the_word_i_is_no_letter_among_many_choices():
    assert parse_letter("Well, I do not know", [f"choice {i}" for i in range(9)]) is None
