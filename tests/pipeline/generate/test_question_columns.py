"""Names of columns that are nearly those of settings are refused; columns of the user's own are carried along."""

import json

import pytest

from gstep.language import Decoding
from pipeline.errors import QuestionsError
from pipeline.generate.answers import ANSWER_SCHEMA
from pipeline.generate.question_columns import KNOWN_COLUMNS, find_meant_column
from pipeline.generate.questions import AnswerMode, read_given_questions, read_questions
from tests.builders.answers import write_questions

MODE = AnswerMode(Decoding())
GOOD = {"question_id": 1, "video_id": "v", "prompt": "p"}
NEAR = {
    "max_new_tokens": (
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_gen_toks", "maxNewTokens", "max-new-tokens"),
        *("Max_New_Tokens", "max_new_token", "max_new_tokn", "max_length"),
    ),
    "temperature": ("Temperature", "TEMPERATURE", "temprature", "temperatures", "temperatur"),
    "choices": ("option", "options", "Options", "choice", "Choices", "chioces", "candidates", "answer_choices"),
    "messages": ("message", "Messages", "mesages", "conversation", "conversations"),
    "system": ("System", "sytem", "system_prompt", "systemMessage"),
    "answer": ("Answer", "answers", "anwser"),
    "seed": ("Seed", "seeds"),
    "top_p": ("topP", "top-p", "TOP_P"),
    "top_k": ("topk", "Top_K"),
}
#: Of files that people have: ids, categories, facts about videos, other texts, results of other models.
OWN = (
    *("category", "answer_id", "prompt_id", "option_order", "topic", "topics", "split", "cluster", "domain", "speed"),
    *("question_type", "question", "query", "video_path", "duration", "duration_s", "text", "source", "language"),
    *("answer_type", "answer_a", "answer_1", "prompt2", "prompt_version", "system_id", "choice_order", "n_options"),
    *("message_count", "turns", "temperature_c", "top_n", "tops", "need", "seen", "tokens", "label", "target"),
    *("status", "rationale", "passage", "start", "end", "stop_s", "options_shuffled", "model", "history", "image"),
    *("key", "n", "sensor_temperature", "max_points", "annotator", "voices", "id", "video", "url", "reward"),
    *("systolic", "тема"),
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
        read_given_questions([{**GOOD, "question_id": 0}, row], MODE)
    assert "questions, row 1: " in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("name", OWN)
def test_columns_of_the_users_own_are_carried_along(name):
    (carried,) = read_given_questions([{**GOOD, name: "x"}], MODE).to_pylist()
    assert carried[f"question_{name}" if name in ANSWER_SCHEMA.names else name] == "x"


def test_a_right_name_makes_near_ones_the_users_own():
    """A file may have the bare question beside the prompt, or the limit of another tool beside the one here."""
    row = {**GOOD, "max_new_tokens": 3, "max_tokens": 9, "choices": ["a", "b"], "option": "x", "question": "q"}
    (read,) = read_given_questions([row], MODE).to_pylist()
    assert (read["max_tokens"], read["option"], read["question"]) == (9, "x", "q")
    with pytest.raises(QuestionsError, match=r"row 1: no column max_tokens .* max_new_tokens"):  # row by row
        read_given_questions([row, {**GOOD, "question_id": 2, "max_tokens": 9}], MODE)


@pytest.mark.parametrize("value", [12, 1.5, "12.5"])
def test_the_time_at_which_a_part_of_a_video_stops_is_no_setting(value):
    assert read_given_questions([{**GOOD, "stop": value}], MODE)["stop"].to_pylist() == [value]


@pytest.mark.parametrize("kind", [".jsonl", ".parquet", ".csv"])
def test_files_are_refused_with_the_row_and_empty_cells_are_no_columns(tmp_path, kind):
    rows = [{**GOOD, "max_tokens": None, "note": "x"}, {**GOOD, "question_id": 2, "max_tokens": 5, "note": "y"}]
    path = str(write_questions(tmp_path / f"q{kind}", rows))
    with pytest.raises(QuestionsError, match=rf"q\{kind}, (line|row) \d: no column max_tokens is read"):
        read_questions(path, MODE)
    table = read_questions(path, MODE, limit=1)
    assert table["note"].to_pylist() == ["x"]
    gaps = [{**GOOD, "Temperature": value} for value in (None, "", float("nan"), [])]
    for number, row in enumerate(gaps):
        (tmp_path / "g.jsonl").write_text(json.dumps({**row, "question_id": number}))
        assert len(read_questions(str(tmp_path / "g.jsonl"), MODE)) == 1


def test_no_known_column_is_near_another():
    assert [find_meant_column(name) for name in KNOWN_COLUMNS] == list(KNOWN_COLUMNS)
