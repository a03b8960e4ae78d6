"""Whatever a cell of the annotations holds, it costs its row alone, and is counted."""

import json

import pytest

from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.annotations import strip_option_letter
from tests.pipeline.evaluate.egoschema import write_authors
from tests.pipeline.evaluate.layouts import faults_of
from tests.pipeline.evaluate.longvideobench import write_longvideobench
from tests.pipeline.evaluate.mlvu import write_mlvu_dev, write_mlvu_test
from tests.pipeline.evaluate.mvbench import write_main

TEXTS = ["", " ", "x\0", "\ud800", "../../x", "/etc", "x" * 5000]
ODD = [*TEXTS, None, [], {}, [[]], ["a"] * 30, [None], True, -1, 5, 1e300]


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("longvideobench", lambda folder: write_longvideobench(folder, json=True), "lvb_val.json"),
        ("mlvu-dev", write_mlvu_dev, "json/1_plotQA.json"),
        ("mlvu-test", write_mlvu_test, "test-ground-truth/test_mcq_gt.json"),
        ("mvbench", write_main, "json/action_sequence.json"),
        ("egoschema-subset", write_authors, "questions.json"),
        ("egoschema", write_authors, "questions.json"),
    ],
)
def test_an_odd_cell_costs_its_row_alone(tmp_path, name, write, file):
    path = write(tmp_path) / file
    rows = json.loads(path.read_text())
    before = BENCHMARKS[name].load(tmp_path)
    odd = [{**rows[0], column: value} for column in rows[0] for value in ODD]
    missing = [{other: cell for other, cell in rows[0].items() if other != column} for column in rows[0]]
    path.write_text(json.dumps([*rows, *odd, *missing]))
    after = BENCHMARKS[name].load(tmp_path)
    faults_of(after)  # the rows add up
    kept = {item.question_id: item for item in after.items}
    assert all(kept[item.question_id] == item for item in before.items)
    assert all(fault.message.isprintable() and len(fault.message.encode()) <= 1024 for fault in after.faults)


def test_only_a_letter_in_front_of_an_option_is_no_part_of_its_text():
    options = ["A. red", "B) red", "(C) red", "D: red", "vitamin A. red", "vitamin B. red"]
    assert [strip_option_letter(option) for option in options] == [*["red"] * 4, *options[4:]]
