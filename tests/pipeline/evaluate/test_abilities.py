"""The table of abilities: which kind of ability a question tests, by the built-in rows and a user's own."""

from typing import get_args

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate import abilities
from pipeline.evaluate.abilities import BUILT_IN, classify_questions, read_ability_rules
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.shapes.questions import QuestionType
from pipeline.evaluate.shapes.world import HARDNESS


def kind_of(benchmark, rules=BUILT_IN, **splits):
    return classify_questions(rules, benchmark, [splits])[0]


@pytest.fixture
def written(tmp_path):
    """Write a user's table below the usual header; return its path."""

    def write(*rows, header="benchmark,split,value,ability", name="abilities.csv"):
        path = tmp_path / name
        path.write_text("\n".join([header, *rows]) + "\n")
        return str(path)

    return write


def test_every_question_of_shapes_has_its_ability_and_a_needle_is_one_whatever_is_asked():
    kinds = {name: kind_of("shapes", task_type=name, domain="plain") for name in get_args(QuestionType)}
    assert kinds == {
        **dict.fromkeys(("color", "shape", "corner", "scene", "change"), "general"),
        **dict.fromkeys(("order", "onset", "quarter"), "order"),
        "count": "counting",
        "sign": "OCR",
    }
    assert "needle" in HARDNESS
    assert {kind_of("shapes", task_type=name, domain="needle") for name in kinds} == {"needle"}


@pytest.mark.parametrize(
    ("benchmark", "splits", "ability"),
    [
        ("videomme", {"task_type": "Counting Problem"}, "counting"),
        ("videomme", {"task_type": "OCR Problems"}, "OCR"),
        ("videomme", {"task_type": "Temporal Perception"}, "order"),
        ("videomme", {"task_type": "Action Reasoning"}, "general"),
        ("mlvu-dev", {"task_type": "needle"}, "needle"),
        ("mlvu-test", {"task_type": "needleQA"}, "needle"),
        ("mlvu-test", {"task_type": "order"}, "order"),
        ("mvbench", {"task": "moving_count"}, "counting"),
        ("mvbench", {"task": "action_localization"}, "grounding"),
        ("longvideobench", {"question_category": "SSS"}, "order"),
        ("longvideobench", {"question_category": "S2E"}, "general"),
        ("egoschema-subset", {}, "general"),
        ("questions.jsonl", {"split": "count"}, "general"),
        ("lmms:timelens_charades", {}, "grounding"),
        ("lmms:vsibench_debiased", {"question_type": "obj_appearance_order"}, "order"),
        ("lmms:tempcompass_yes_no", {"dim": "order"}, "order"),
        ("lmms:tempcompass_yes_no", {"dim": "speed"}, "general"),
        ("lmms:cgav_counting_long", {}, "counting"),
        ("lmms:mmvu_val", {}, "general"),
    ],
)
def test_built_in_rows(benchmark, splits, ability):
    assert kind_of(benchmark, **splits) == ability


def test_the_built_in_rows_name_splits_and_parts_that_the_benchmarks_have():
    for rule in (rule for rule in BUILT_IN if not rule.benchmark.startswith("lmms:")):
        named = [BENCHMARKS[name] for name in BENCHMARKS if rule.matches_benchmark(name)]
        splits = [split for benchmark in named for split in benchmark.splits if split.name == rule.split]
        assert len(splits) == len(named) > 0, rule
        assert any(not split.parts or rule.value in split.parts for split in splits), rule


def test_a_users_rows_come_first_in_the_files_order_and_may_name_kinds_of_their_own(written):
    own = read_ability_rules(
        written("video*,task_type,Counting Problem,Sums", "videomme,,,ocr", "mlvu-dev,task_type,ego,GROUNDING")
    )
    rules = [*own, *BUILT_IN]
    assert kind_of("videomme", rules, task_type="Counting Problem") == "Sums"
    assert kind_of("videomme", rules, task_type="Temporal Perception") == "OCR"  # the first row that matches
    assert kind_of("mlvu-dev", rules, task_type="ego") == "grounding"
    assert kind_of("mlvu-dev", rules, task_type="count") == "counting"
    assert abilities.order_abilities(["general", "Sums", "OCR", "counting", "Sums"]) == [
        "counting",
        "OCR",
        "Sums",
        "general",
    ]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (["videomme,,"], {}, "abilities.csv, line 2: ability is empty; write the columns"),
        ([",,,order"], {}, "abilities.csv, line 2: benchmark is empty"),
        (["a,,,order", "videomme,task_type,,order"], {}, "line 3: split and value go together"),
        (["videomme,a,b,c,d"], {}, "line 2: more cells than the header names"),
        ([], {}, "it has no row below the names of its columns"),
        (["videomme,order"], {"header": "benchmark,kind"}, "line 1: a .csv begins with the names of its columns"),
        (["a,b,order"], {"header": "benchmark,task,ability"}, "line 2: there is no column 'task'"),
        (["videomme,,,order"], {"name": "abilities.tsv"}, "abilities.tsv: name a .csv with the columns"),
        (None, {}, r"--abilities none\.csv: cannot be read: .*; name a \.csv"),  # there is no such file
    ],
)
def test_a_malformed_file_is_refused_by_file_row_and_remedy(written, rows, options, message):
    with pytest.raises(UsageError, match=message) as error:
        read_ability_rules("none.csv" if rows is None else written(*rows, **options))
    assert "benchmark,split,value,ability" in str(error.value) or "such as videomme" in str(error.value)


def test_rows_about_no_question_of_the_results_are_told_of(written):
    path = written("shaps,,,order", "videomme,task_type,Counting,counting", "shapes,,,order", "videomme,,,OCR")
    splits = {"shapes": [{"task_type": "sign"}], "videomme": [{"task_type": "Counting Problem"}]}
    assert abilities.list_unused_rules([*read_ability_rules(path), *BUILT_IN], splits) == [
        f"{path}, line 2: there are no results of a benchmark 'shaps'; the benchmarks are shapes, videomme",
        f"{path}, line 3: no question of videomme has task_type=Counting",
    ]
