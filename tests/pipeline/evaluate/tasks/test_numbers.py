"""The number of a task is a mean over documents only where it is one for every mixture of replies."""

import random
from statistics import fmean, median

import numpy as np
import pytest

from pipeline.evaluate.tasks.numbers import MAX_PARTS, as_number, find_explanation

N_RESULTS = 5  # of each document: those of two methods, and of three replies that are only tried


def explained(results, aggregate, fields=None, keys=None, n_methods=2):
    keys = keys or [str(number) for number in range(len(results))]
    return find_explanation(results, aggregate, fields or [{} for _ in results], keys, n_methods)


def draw(n_documents, values=(0.0, 1.0), seed=0):
    """Results of documents: N_RESULTS values each, not all of them equal."""
    drawn = random.Random(seed)
    return [[*drawn.sample(values, 2), *drawn.choices(values, k=N_RESULTS - 2)] for _ in range(n_documents)]


def by_part(results_and_parts):
    parts = {}
    for value, part in results_and_parts:
        parts.setdefault(part, []).append(value)
    return {part: fmean(values) for part, values in parts.items()}


MEANS = [
    ((0.0, 0.25, 0.7, 1.0), fmean, False),
    *(([kind(0), kind(1)], lambda of_all: np.float64(np.mean(of_all)), False) for kind in (bool, np.float32)),
    ((0.0, 1.0), lambda of_all: 100 * fmean(of_all), True),
    ((0.0, 30.0, 100.0), fmean, True),
    ((0.0, 1.0), lambda of_all: round(100 * fmean(of_all), 2), True),
]


@pytest.mark.parametrize(("values", "aggregate", "percent"), MEANS)
def test_a_mean_or_a_percentage_of_numbers_is_a_share_of_each_document(values, aggregate, percent):
    results = draw(7, values)
    found = explained(results, aggregate)
    assert (found.mean_over, found.weights, found.percent) == ("questions", {}, percent)
    assert found.values == [[float(value) / max(values) for value in row] for row in results]
    assert found.counted == [True] * 7


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
    results = [[{f"key{i}": text} for text in ("yes", "no", "yes, it is", "", "A")] for i in range(6)]

    def aggregate(of_all):
        merged = {key: text for one in of_all for key, text in one.items()}
        return 100 * sum(text.startswith("yes") for text in merged.values()) / len(merged)

    found = explained(results, aggregate)
    assert found.values == [[1.0, 0.0, 1.0, 0.0, 0.0]] * 6 and found.percent


def part_results(numbers, parts, weights=None):
    """Results with the part of their document, and the mean over these parts as the rule."""

    def aggregate(of_all):
        means = by_part((one["value"], one["part"]) for one in of_all)
        if weights is None:
            return fmean(means.values())
        return round(sum(weights.get(part, 0) * mean for part, mean in means.items()), 6)

    rows = zip(numbers, parts, strict=True)
    return [[{"value": value, "part": part} for value in row] for row, part in rows], aggregate


# The mean of eight numbers, of which one is itself a mean of three, as of VSI-Bench.
UNLIKE = dict.fromkeys([f"type{i}" for i in range(7)], 1 / 8) | dict.fromkeys(("easy", "medium", "hard"), 1 / 24)
TWENTY = [f"part{i % 20}" for i in range(50)]


@pytest.mark.parametrize(
    ("parts", "weights", "shown"),
    [
        ("aaaabbc", dict.fromkeys("abc", 1 / 3), float),
        ([*UNLIKE, *UNLIKE, "easy", "easy", "type3"], UNLIKE, float),
        (TWENTY, dict.fromkeys(TWENTY, 1 / 20), lambda number: round(100 * number, 2)),
        ("abbaccb", {"b": 1.0}, float),
    ],
    ids=["equal", "unlike", "of a rounded percentage", "one part"],
)
def test_the_weights_of_parts_are_found_and_other_documents_do_not_count(parts, weights, shown):
    results, rule = part_results(draw(len(parts)), parts, weights)
    fields = [{"name": f"n{i}", "task": part} for i, part in enumerate(parts)]
    found = explained(results, lambda of_all: shown(rule(of_all)), fields)
    assert found.mean_over == "task" and found.weights == pytest.approx(weights, abs=1e-12)
    assert found.counted == [part in weights for part in parts]


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


def share_of_answered(of_all):
    """How many documents count depends on the replies: 0.5 is none."""
    return sum(value == 1 for value in of_all) / sum(value != 0.5 for value in of_all)


def failing(of_all):
    raise KeyError("object_rel_direction_easy_accuracy")


THREE = draw(9, (0.0, 0.4, 1.0))
UNEXPLAINED = {
    "a share of two digits": (draw(7), lambda of_all: round(fmean(of_all), 2)),
    "median": (THREE, median),
    "sum": (THREE, lambda of_all: float(sum(of_all))),
    "a share of the answered": (draw(9, (0.0, 0.5, 1.0)), share_of_answered),
    "an error": (draw(5), failing),
    "None": (draw(5), lambda of_all: None),
    "always 1": ([[1.0] * N_RESULTS] * 6, max),
    "below 0": (draw(6, (-1.0, 0.0, 1.0)), fmean),
    "no number of a document": (
        [*draw(6), [0.0, "none", 1.0, 0.0, 1.0]],
        lambda of_all: fmean(one for one in of_all if one != "none"),
    ),
}


@pytest.mark.parametrize("kind", UNEXPLAINED)
def test_a_number_that_is_no_mean_of_shares_is_not_explained(kind):
    results, aggregate = UNEXPLAINED[kind]
    assert explained(results, aggregate) is None
    assert explained(results, aggregate, [{"half": "ab"[i > 4]} for i in range(len(results))]) is None


@pytest.mark.parametrize("aggregate", [max, median])
def test_few_documents_on_which_the_methods_agree_with_a_mean_by_chance(aggregate):
    """Every method is right everywhere or nowhere, so max, median and mean are all the same numbers for them."""
    results = [[1.0, 0.0, 1.0, 0.0, 0.0] for _ in range(3)]
    assert explained(results, aggregate, [{"id": str(i)} for i in range(3)]) is None


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
    results, rule = part_results([[1.0, 0.0, 1.0, 0.0]] * 3 + [row[:4] for row in draw(7)], "abcabcabca")

    def strict(of_all):
        if sum(one["value"] for one in of_all[:3]) == 1:
            raise ZeroDivisionError
        return rule(of_all)

    found = explained(results, strict, [{"task": part} for part in "abcabcabca"])
    assert found.mean_over == "task" and found.weights == pytest.approx(dict.fromkeys("abc", 1 / 3))


@pytest.mark.parametrize("extra", [1, lambda: 1], ids=["pickled", "deep"])
def test_a_rule_that_changes_the_results_changes_nothing(extra):
    numbers = draw(6)
    results = [[{"score": value, "more": [1, 2], "extra": extra} for value in row] for row in numbers]

    def aggregate(of_all):
        scores = [one.pop("score") for one in of_all if one["more"]]
        for one in of_all:
            one["more"].clear()
        of_all.clear()
        return fmean(scores)

    found = explained(results, aggregate)
    assert found.values == numbers and all(one["more"] == [1, 2] and "score" in one for row in results for one in row)


def test_what_is_a_number():
    assert [as_number(value) for value in (True, 2, 0.5, np.float32(0.5), np.bool_(False))] == [1.0, 2.0, 0.5, 0.5, 0.0]
    wrong = (None, "1", float("nan"), float("inf"), [1.0], np.array([1.0, 2.0]), np.str_("1"))
    assert [as_number(value) for value in wrong] == [None] * len(wrong)
