"""The number of a task is a mean over documents only where it is one for every mixture of replies."""

from __future__ import annotations

import random
from copy import deepcopy
from statistics import fmean, median

import numpy as np
import pytest

from pipeline.evaluate.tasks.numbers import MAX_PARTS, as_number, find_explanation

N_RESULTS = 5  # of each document: those of two methods, and of three replies that are only tried


def explained(results, aggregate, fields=None, keys=None, n_methods=2):
    fields = fields or [{} for _ in results]
    return find_explanation(
        results, aggregate, fields, keys or [str(number) for number in range(len(results))], n_methods
    )


def draw(n_documents, values=(0.0, 1.0), seed=0):
    """Results of documents: N_RESULTS values each, not all of them equal."""
    drawn = random.Random(seed)
    return [[*drawn.sample(values, 2), *drawn.choices(values, k=N_RESULTS - 2)] for _ in range(n_documents)]


def by_part(results_and_parts):
    parts = {}
    for value, part in results_and_parts:
        parts.setdefault(part, []).append(value)
    return {part: fmean(values) for part, values in parts.items()}


def test_a_plain_mean_of_numbers_is_one():
    results = draw(7, (0.0, 0.25, 0.7, 1.0))
    found = explained(results, fmean)
    assert (found.mean_over, found.weights, found.percent) == ("questions", {}, False)
    assert found.values == results and found.counted == [True] * 7


@pytest.mark.parametrize("kind", [bool, int, np.float32, np.bool_])
def test_truth_values_and_numpy_scalars_are_numbers(kind):
    results = [[kind(value) for value in row] for row in draw(6)]
    found = explained(results, lambda of_all: np.float64(np.mean(of_all)))
    assert found.mean_over == "questions" and found.values == [[float(value) for value in row] for row in results]


@pytest.mark.parametrize(
    ("values", "aggregate"),
    [
        ((0.0, 1.0), lambda of_all: 100 * fmean(of_all)),
        ((0.0, 30.0, 100.0), fmean),
        ((0.0, 1.0), lambda of_all: round(100 * fmean(of_all), 2)),
        ((0, 100), lambda of_all: round(fmean(of_all), 2)),
    ],
    ids=["of shares", "of percentages", "rounded", "rounded of percentages"],
)
def test_a_percentage_is_a_share_of_each_document(values, aggregate):
    results = draw(7, values)
    found = explained(results, aggregate)
    assert (found.mean_over, found.percent) == ("questions", True)
    assert found.values == [[value / max(values) for value in row] for row in results]


def test_a_share_that_is_rounded_to_two_digits_is_not_explained():
    assert explained(draw(7), lambda of_all: round(fmean(of_all), 2)) is None


def test_a_field_of_the_results_that_has_the_mean_is_found():
    numbers = draw(8)
    results = [
        [{"id": i, "length": 90 - value, "rating": value, "text": "t"} for value in row]
        for i, row in enumerate(numbers)
    ]
    found = explained(results, lambda of_all: 100 * sum(one["rating"] == 1 for one in of_all) / len(of_all))
    assert found.values == numbers and found.mean_over == "questions" and found.percent


def test_kinds_of_questions_may_name_the_field_differently():
    numbers = draw(8, (0.0, 0.5, 1.0))
    results = [
        [{("accuracy", "error")[i % 2]: value, "kind": "ab"[i % 2]} for value in row] for i, row in enumerate(numbers)
    ]

    def aggregate(of_all):
        if len(of_all) < 2:
            raise KeyError("error")
        means = by_part((one.get("accuracy", one.get("error")), one["kind"]) for one in of_all)
        return (means["a"] + means["b"]) / 2

    found = explained(results, aggregate, [{"kind": "ab"[i % 2]} for i in range(8)])
    assert found.values == numbers and found.mean_over == "questions"  # both kinds have four documents
    found = explained(results[:7], aggregate, [{"kind": "ab"[i % 2]} for i in range(7)])
    assert (found.mean_over, found.weights) == ("kind", {"a": 0.5, "b": 0.5}) and found.values == numbers[:7]


def test_what_the_task_makes_of_one_result_alone_is_its_number():
    texts = [["yes", "no", "yes, it is", "", "A"] for _ in range(6)]
    results = [[{f"key{i}": text} for text in row] for i, row in enumerate(texts)]

    def aggregate(of_all):
        merged = {key: text for one in of_all for key, text in one.items()}
        return 100 * sum(text.startswith("yes") for text in merged.values()) / len(merged)

    found = explained(results, aggregate)
    assert found.values == [[1.0, 0.0, 1.0, 0.0, 0.0]] * 6 and found.percent


def test_parts_of_unequal_size_that_weigh_the_same():
    parts = "aaaabbc"
    found = explained(*part_results(draw(7), parts), [{"name": f"n{i}", "task": part} for i, part in enumerate(parts)])
    assert found.mean_over == "task" and found.counted == [True] * 7
    assert found.weights == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})


def part_results(numbers, parts, weights=None):
    """Results with the part of their document, and the mean over these parts as the rule."""

    def aggregate(of_all):
        means = by_part((one["value"], one["part"]) for one in of_all)
        if weights is None:
            return fmean(means.values())
        return round(sum(weights[part] * mean for part, mean in means.items()), 6)

    rows = zip(numbers, parts, strict=True)
    return [[{"value": value, "part": part} for value in row] for row, part in rows], aggregate


def test_parts_of_unlike_weights():
    """The mean of eight numbers, of which one is itself a mean of three, as of VSI-Bench."""
    names = [f"type{i}" for i in range(7)] + ["easy", "medium", "hard"]
    weights = {name: 1 / 8 if name.startswith("type") else 1 / 24 for name in names}
    parts = [*names, *names, "easy", "easy", "type3"]
    results, rule = part_results(draw(len(parts), (0.0, 0.3, 1.0)), parts, weights)
    found = explained(results, rule, [{"question_type": part, "id": str(i)} for i, part in enumerate(parts)])
    assert found.mean_over == "question_type"
    assert found.weights == pytest.approx(weights, abs=1e-12)


def test_equal_weights_are_found_of_a_rounded_percentage():
    parts = [f"part{i % 20}" for i in range(50)]
    results, rule = part_results(draw(len(parts)), parts)
    fields = [{"task": part} for part in parts]
    found = explained(results, lambda of_all: round(100 * rule(of_all), 2), fields)
    assert found.weights == pytest.approx(dict.fromkeys(parts, 1 / 20), abs=1e-12)


def test_a_number_about_one_part_whose_rule_gives_the_others_nothing():
    """As of tasks that count right answers and documents of each kind, whatever kind a document is of."""
    parts = "pmqmqm"
    results = [
        [{"score": value if part == "m" else 0, "total": int(part == "m")} for value in row]
        for row, part in zip(draw(6), parts, strict=True)
    ]

    def share(of_all):
        n = sum(one["total"] for one in of_all)
        return round(100 * sum(one["score"] for one in of_all) / n, 2) if n else 0.0

    found = explained(results, share, [{"type": part} for part in parts])
    assert (found.mean_over, found.weights, found.percent) == ("type", {"m": 1.0}, True)
    assert found.counted == [part == "m" for part in parts]


def test_parts_in_which_no_reply_scores_count_only_if_all_parts_weigh_the_same():
    """Else their weights cannot be told from those of parts that a number is not about."""
    for weights, is_explained in (({"a": 0.5, "b": 0.25, "hard": 0.25}, False), (dict.fromkeys("abc", 1 / 3), True)):
        parts = [*weights, *weights, "a", "b"]
        numbers = [
            [0.0] * N_RESULTS if part in ("hard", "c") else row for row, part in zip(draw(8), parts, strict=True)
        ]
        results, rule = part_results(numbers, parts, weights)
        found = explained(results, rule, [{"task": part} for part in parts])
        assert (found is not None) == is_explained
    assert found.weights == pytest.approx(weights) and all(found.counted)


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_number_about_one_part_counts_its_documents_alone(name):
    parts = "abbaccb"
    results, rule = part_results(draw(7), parts, {part: float(part == name) for part in "abc"})
    found = explained(results, rule, [{"kind": part} for part in parts])
    assert (found.mean_over, found.weights) == ("kind", {name: 1.0})
    assert found.counted == [part == name for part in parts]


def test_of_equal_documents_the_last_one_counts_where_the_task_merges_them():
    keys = ["v", "w", "v", "x", "y", "v"]
    numbers = draw(6)
    results = [[{key: value} for value in row] for key, row in zip(keys, numbers, strict=True)]

    def merged(of_all):
        last = {key: value for one in of_all for key, value in one.items()}
        return fmean(last.values())

    found = explained(results, merged, keys=keys)
    assert found.counted == [False, True, False, True, True, True] and found.values == numbers
    found = explained(numbers, fmean, keys=keys)
    assert found.counted == [True] * 6


def f_measure(of_all):
    """F1 of answers that say yes, of pairs (said, is)."""
    hits = sum(said and true for said, true in of_all)
    return 2 * hits / max(1, sum(said for said, _ in of_all) + sum(true for _, true in of_all))


@pytest.mark.parametrize(
    "aggregate",
    [
        max,
        median,
        lambda of_all: fmean(of_all) ** 2,
        lambda of_all: float(all(of_all)),
        lambda of_all: float(sum(of_all)),
        lambda of_all: fmean(of_all[::2]),
    ],
    ids=["max", "median", "square", "all", "sum", "every second"],
)
def test_a_number_that_is_no_mean_is_refused(aggregate):
    assert explained(draw(9, (0.0, 0.4, 1.0)), aggregate, [{"half": "ab"[i > 4]} for i in range(9)]) is None


def test_a_harmonic_mean_of_answers_is_refused():
    results = [[(said, i % 3 == 0) for said in row] for i, row in enumerate(draw(9, (True, False)))]
    assert explained(results, f_measure) is None


def test_a_share_of_the_answered_questions_is_refused():
    """How many documents count depends on the replies there."""
    results = [[{"right": value, "said": 1 - (value == 0.5)} for value in row] for row in draw(9, (0.0, 0.5, 1.0))]
    assert (
        explained(results, lambda of_all: sum(r["right"] == 1 for r in of_all) / sum(r["said"] for r in of_all)) is None
    )


@pytest.mark.parametrize("n_documents", [2, 3, 4])
@pytest.mark.parametrize("aggregate", [max, median, lambda of_all: float(all(of_all))], ids=["max", "median", "all"])
def test_few_documents_on_which_the_methods_agree_with_a_mean_by_chance(n_documents, aggregate):
    """Every method is right everywhere or nowhere, so max, median and mean are all the same numbers for them."""
    results = [[1.0, 0.0, 1.0, 0.0, 0.0] for _ in range(n_documents)]
    numbers = [[row[place] for row in results] for place in range(N_RESULTS)]
    assert [aggregate(of_one) for of_one in numbers] == [fmean(of_one) for of_one in numbers]
    found = explained(results, aggregate, [{"id": str(i)} for i in range(n_documents)])
    assert found is None or (aggregate is median and n_documents == 2)  # which is a mean


def test_fields_that_many_documents_share_come_before_their_ids():
    parts = "aabbbccccc"
    results, rule = part_results(draw(10), parts)
    fields = [{"id": str(i), "name": f"n{i}", "task": part} for i, part in enumerate(parts)]
    assert explained(results, rule, fields).mean_over == "task"
    alone = [{"id": str(i), "name": f"n{i}"} for i in range(10)]
    assert explained(results, rule, alone).mean_over == "name"  # a mean over documents with weights


def test_fields_with_too_many_values_or_missing_somewhere_are_no_parts():
    parts = [f"part{i % (MAX_PARTS + 1)}" for i in range(2 * MAX_PARTS + 3)]
    results, rule = part_results(draw(len(parts)), parts)
    assert explained(results, rule, [{"task": part} for part in parts]) is None
    results, rule = part_results(draw(7), "aaaabbc")
    fields = [{"task": part} for part in "aaaabbc"]
    assert explained(results, rule, [{**fields[0], "other": "x"}, *fields[1:]]).mean_over == "task"
    assert explained(results, rule, [{}, *fields[1:]]) is None


def test_a_rule_that_raises_makes_no_number():
    def failing(of_all):
        raise KeyError("object_rel_direction_easy_accuracy")

    assert explained(draw(5), failing) is None
    assert explained(draw(5), lambda of_all: None) is None
    assert explained(draw(5), lambda of_all: float("nan")) is None


def share_of_a(of_all):
    """The share of replies that begin with A, by a rule that cannot take an empty reply."""
    return fmean(float(one["said"][0] == "A") for one in of_all)


def said(texts):
    return [[{"said": text, "right": float(text[:1] == "A")} for text in row] for row in texts]


def test_replies_that_a_rule_cannot_take_are_not_tried():
    """Of the tried replies one is empty: each mixture with it would be refused."""
    texts = [[*("AB" if i % 2 else "BA"), "A", "", "C"] for i in range(30)]
    found = explained(said(texts), share_of_a)
    assert found.values == [[float(text == "A") for text in row if text] for row in texts]


def test_a_method_without_a_number_leaves_the_others_without_scores():
    texts = [["A", "B", "A", "C", "B"] for _ in range(8)]
    texts[3][1] = ""
    assert explained(said(texts), share_of_a) is None
    assert explained(said(texts), share_of_a, n_methods=1).values[3] == [1.0, 1.0, 0.0, 0.0]


def test_some_mixtures_may_be_refused():
    """The rule fails where one of the first three documents is right: for three of eight mixtures, and no method."""
    results, rule = part_results([[1.0, 0.0, 1.0, 0.0]] * 3 + draw_four(7), "abcabcabca")

    def strict(of_all):
        if sum(one["value"] for one in of_all[:3]) == 1:
            raise ZeroDivisionError
        return rule(of_all)

    found = explained(results, strict, [{"task": part} for part in "abcabcabca"])
    assert found.mean_over == "task" and found.weights == pytest.approx(dict.fromkeys("abc", 1 / 3))


def draw_four(n_documents):
    return [row[:4] for row in draw(n_documents)]


def test_a_number_that_no_reply_changes_is_not_explained():
    assert explained([[1.0] * N_RESULTS for _ in range(6)], max) is None
    assert explained([[0.0] * N_RESULTS for _ in range(6)], fmean) is None


def test_a_rule_that_changes_the_results_changes_nothing():
    numbers = draw(6)
    results = [[{"score": value, "more": [1, 2]} for value in row] for row in numbers]
    before = deepcopy(results)

    def aggregate(of_all):
        scores = [one.pop("score") for one in of_all]
        for one in of_all:
            one["more"].clear()
        of_all.clear()
        return fmean(scores)

    found = explained(results, aggregate)
    assert found.values == numbers and results == before


@pytest.mark.parametrize("values", [(-1.0, 0.0, 1.0), (0.0, 50.0, 250.0)])
def test_numbers_that_are_no_shares_have_no_scores(values):
    assert explained(draw(6, values), fmean) is None


def test_a_document_without_a_number_has_no_scores():
    results = [*draw(6), [0.0, "none", 1.0, 0.0, 1.0]]
    assert explained(results, lambda of_all: fmean(one for one in of_all if one != "none")) is None


def test_what_is_a_number():
    assert [as_number(value) for value in (True, 2, 0.5, np.float32(0.5), np.bool_(False))] == [1.0, 2.0, 0.5, 0.5, 0.0]
    wrong = (None, "1", float("nan"), float("inf"), [1.0], np.array([1.0, 2.0]), np.str_("1"))
    assert [as_number(value) for value in wrong] == [None] * len(wrong)
