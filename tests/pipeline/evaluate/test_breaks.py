"""Where methods break, from the table of abilities and the scores to the page."""

import json
import re
from math import ceil
from typing import get_args
from zlib import crc32

import numpy as np
import pytest

from jobs import evaluate
from pipeline.errors import UsageError
from pipeline.evaluate import abilities
from pipeline.evaluate.abilities import BUILT_IN, AbilityRule, classify_questions, read_ability_rules
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.forms import format_markdown_tables
from pipeline.evaluate.losses import find_breaks
from pipeline.evaluate.shapes.questions import QuestionType
from pipeline.evaluate.shapes.world import HARDNESS
from pipeline.evaluate.tabulate import ScoredBenchmark, make_results_table
from tests.pipeline.evaluate.score_tables import Page, leave_results, score_rows, score_table, table_of

PER_VIDEO = 50  # questions about a video, so that one of them is 2 points
RATIOS = (0.5, 0.25, 0.1)


def clusters_of(n_questions, per_video=PER_VIDEO):
    return [f"v{i // per_video:03}" for i in range(n_questions)]


def steady(lost, n_videos=20, **splits):
    """Make scores of which the same number is lost in every video, so that the interval is a single number.

    ``lost`` maps (method, ratio) to that number.
    """
    arms = {arm: n_videos * ([0.0] * n + [1.0] * (PER_VIDEO - n)) for arm, n in {("none", 1.0): 0, **lost}.items()}
    n_questions = n_videos * PER_VIDEO
    return table_of(arms, clusters=clusters_of(n_questions), splits=[splits] * n_questions)


def falling(method, *lost):
    """Map the ratios of a method to the numbers of lost answers in every video."""
    return dict(zip([(method, ratio) for ratio in RATIOS], lost, strict=False))


def breaks_of(within=2.0, rules=BUILT_IN, methods=None, **scores):
    """Find the breaks of benchmarks by name; "_" stands for a "-"."""
    benchmarks = {
        name.replace("_", "-"): of_one if isinstance(of_one, ScoredBenchmark) else ScoredBenchmark(name, of_one)
        for name, of_one in scores.items()
    }
    return find_breaks(benchmarks, rules, within=within, methods=methods, draws=100)


def only(breaks):
    (verdict,) = breaks.verdicts
    return verdict


def outcomes(verdict):
    return [loss.outcome for loss in verdict.losses]


@pytest.mark.parametrize(
    ("lost", "within", "found", "answer", "reason"),
    [
        # The last ratio would pass by itself.
        ((0, 2, 0), 2, ["no change", "loses", "no change"], "50%", "in 1,000; at 25% it loses 4.0 points [-4.0, -4.0]"),
        ((0, 0, 1), 3, ["no change", "no change", "passes"], "10%", "the lowest ratio that was tested"),
        ((0, 0, 0), 2, ["no change"] * 3, "10%", "no change in 1,000; the lowest ratio that was tested"),
        ((3, 0, 0), 2, ["loses", "no change", "no change"], "none", "at 50% it loses 6.0 points [-6.0, -6.0]"),
        ((1,), 1.9, ["loses"], "none", "no tested ratio is safe: "),
        ((1,), 2.0, ["may lose"], "none", "no tested ratio is safe: "),
        ((1,), 2.1, ["passes"], "50%", "the lowest ratio that was tested"),
    ],
)
def test_ratios_are_tested_from_the_largest_down_and_the_first_whose_lower_end_is_at_the_limit_ends_the_test(
    lost, within, found, answer, reason
):
    verdict = only(breaks_of(shapes=steady(falling("gstep", *lost)), within=within))
    assert (outcomes(verdict), verdict.answer) == (found, answer) and reason in verdict.reason
    lowest = verdict.lowest_safe_ratio
    assert lowest == (None if answer == "none" else float(answer.removesuffix("%")) / 100)
    safe = [of_one["safe"] for of_one in verdict.as_record()["losses"]]
    assert safe == [lowest is not None and ratio >= lowest for ratio, _ in zip(RATIOS, lost, strict=False)]


def test_fewer_than_20_videos_tell_nothing_even_where_nothing_changes_and_of_several_tasks_the_fewest_count():
    few, enough = (steady({("gstep", 0.5): 0}, n_videos) for n_videos in (19, 20))
    assert only(breaks_of(shapes=enough)).answer == "50%"
    for scores, tail in (({"shapes": few}, ""), ({"shapes": enough, "mvbench": few}, " of mvbench")):
        verdict = only(breaks_of(**scores))
        assert (verdict.answer, verdict.reason) == ("cannot be told", f"19 videos{tail}")


def test_an_interval_that_is_too_wide_tells_nothing_unless_it_lies_wholly_below_the_limit():
    """Of 40 questions about a video each; a later ratio is named with its half width."""
    full, changed = [1.0] * 20 + [0.0] * 20, [0.0] * 4 + [1.0] * 20 + [0.0] * 16

    def verdict_of(full, *pruned):
        arms = {("none", 1.0): full, **falling("gstep", *pruned)}
        return only(breaks_of(shapes=table_of(arms)))

    wide = verdict_of(full, changed)
    assert outcomes(wide) == ["wide"] and wide.answer == "cannot be told"
    assert re.fullmatch(r"half width \d\d\.\d\d at 50%", wide.reason)
    gains = verdict_of(full, [1.0] * 30 + [0.0] * 10)
    assert gains.losses[0].low > 2 and outcomes(gains) == ["wide"]  # no exception for a gain
    lost = verdict_of([1.0] * 40, [0.0] * 36 + [1.0] * 4)
    assert lost.losses[0].half_width > 2 and outcomes(lost) == ["loses"] and lost.answer == "none"
    later = verdict_of(full, full, changed)
    assert later.answer == "50%"
    assert re.fullmatch(r"no change in 40; at 25% it cannot be told: half width \d\d\.\d\d", later.reason)


def test_a_kind_is_the_equal_mean_of_tasks_of_unlike_sizes():
    small = steady({("gstep", 0.5): 2}, 20, task_type="count")
    large = steady({("gstep", 0.5): 0}, 60, task="moving_count")
    breaks = breaks_of(shapes=small, mvbench=large)
    verdict = only(breaks)
    assert verdict.losses[0].difference == pytest.approx(-2) and outcomes(verdict) == ["may lose"]
    assert verdict.kind.name == "counting"
    of_each = "shapes (1,000 questions, 20 videos) + mvbench (3,000 questions, 60 videos)"
    assert verdict.kind.text == f"{of_each}; full retention 100.0"
    assert breaks.not_measured == ["grounding", "order", "hallucination", "OCR", "needle", "general"]
    (remark,) = breaks.remarks
    assert remark.startswith(f"Not measured here: {', '.join(breaks.not_measured)}.") and "--abilities" in remark


def test_a_benchmark_that_averages_over_parts_does_so_within_the_kind():
    """A count is of another kind, and of the others, ego has one question in a video and plotQA three."""
    splits = 20 * [{"task_type": part} for part in ("count", "ego", "plotQA", "plotQA", "plotQA")]
    arms = {("none", 1.0): [1.0] * 100, ("gstep", 0.5): 20 * [1.0, 0.0, 1.0, 1.0, 1.0]}
    scores = table_of(arms, clusters=clusters_of(100, 5), splits=splits)
    for mean_over, difference in (("task_type", -50), (None, -25)):
        breaks = breaks_of(mlvu_dev=ScoredBenchmark("M", scores, mean_over=mean_over))
        lost = {verdict.kind.name: verdict.losses[0].difference for verdict in breaks.verdicts}
        assert lost == {"counting": 0, "general": pytest.approx(difference)}


def test_a_method_or_ratio_that_a_benchmark_lacks_has_no_number_and_is_not_averaged_over_fewer():
    first = steady({**falling("gstep", 0, 0, 0), **falling("fps", 0, 0), ("random", 0.5): 0, ("random,seed=1", 0.5): 0})
    second = steady({("gstep", 0.5): 0, ("gstep", 0.1): 0, ("random", 0.5): 0})
    verdicts = {verdict.title: verdict for verdict in breaks_of(shapes=first, mvbench=second).verdicts}
    gstep, fps, random = verdicts["GSTEP"], verdicts["FPS"], verdicts["Random, 2 seeds"]
    assert outcomes(gstep) == ["no change", "not run", "no change"] and gstep.losses[1].difference is None
    assert gstep.answer == "10%" and gstep.reason.endswith("was tested; 25% not run on mvbench")
    assert (fps.answer, fps.reason) == ("cannot be told", "not run on mvbench")
    assert (random.answer, random.reason) == ("cannot be told", "not run with all 2 seeds on mvbench")
    few = breaks_of(shapes=steady(falling("gstep", 0, 0, 0), 19), mvbench=steady(falling("gstep", 0, 0)))
    assert only(few).reason == "19 videos of shapes"  # at every ratio, whether or not it was run
    unpaired = score_table(score_rows("gstep", 0.5, [1.0] * 30))
    assert only(breaks_of(shapes=unpaired)).reason == "full retention not run on shapes"


def test_seeds_are_averaged_and_positions_are_lines_of_their_own():
    arms = {("random", 0.5): 0, ("random,seed=1", 0.5): 1, ("gstep", 0.5): 0, ("gstep,positions=original", 0.5): 3}
    verdicts = {verdict.title: verdict for verdict in breaks_of(shapes=steady(arms)).verdicts}
    random = verdicts["Random, 2 seeds"]
    assert random.losses[0].difference == pytest.approx(-1) and outcomes(random) == ["passes"]
    assert [verdicts[title].answer for title in ("GSTEP", "GSTEP, original positions")] == ["50%", "none"]
    assert only(breaks_of(shapes=steady(arms), methods=["random"])).title == random.title


@pytest.mark.parametrize(("right", "answer"), [(0, "cannot be told"), (1, "cannot be told"), (2, "none")])
def test_where_full_retention_scores_nothing_no_ratio_is_safe(right, answer):
    """One right answer in 50 is a score of 2, of which 2 points cannot be lost."""
    full = 20 * ([1.0] * right + [0.0] * (PER_VIDEO - right))
    arms = {("none", 1.0): full, ("gstep", 0.5): [0.0] * len(full)}
    verdict = only(breaks_of(shapes=table_of(arms, clusters=clusters_of(len(full)))))
    assert (verdict.answer, verdict.lowest_safe_ratio) == (answer, None)
    assert (verdict.reason == f"full retention scores {2 * right}.0") is (answer == "cannot be told")


def test_benchmarks_whose_scores_are_not_per_question_take_no_part():
    scores = steady({("gstep", 0.5): 0})
    own_number = ScoredBenchmark("EgoSchema", steady({("gstep", 0.5): 9, ("fps", 0.5): 9}), per_question=False)
    breaks = breaks_of(shapes=scores, egoschema=own_number, rules=[AbilityRule("egoschema", "", "", "order", "f")])
    assert only(breaks).answer == "50%" and [kind.text for kind in breaks.kinds] == [
        "shapes (1,000 questions, 20 videos); full retention 100.0"
    ]
    (note,) = breaks.notes
    assert note == "EgoSchema is left out here: its numbers are not means over the scores of questions."
    assert breaks_of(egoschema=own_number).verdicts == []
    table = make_results_table("m", [own_number], draws=100)
    assert "nothing can be said" in format_markdown_tables(table, breaks=breaks_of(egoschema=own_number))
    assert "Where it breaks" not in format_markdown_tables(table)


def test_rules_of_a_user_come_before_the_built_in_ones():
    scores = steady({("gstep", 0.5): 0}, task_type="count", domain="needle")
    rules = [AbilityRule("sh*", "task_type", "count", "sums", "f, line 2"), AbilityRule("x", "", "", "y", "f, line 3")]
    assert [kind.name for kind in breaks_of(shapes=scores).kinds] == ["needle"]
    breaks = breaks_of(shapes=scores, rules=[*rules, *BUILT_IN])
    assert [kind.name for kind in breaks.kinds] == ["sums"]
    assert breaks.notes == ["f, line 3: there are no results of a benchmark 'x'; the benchmarks are shapes."]


def random_case(generator, n_questions, per_video, values):
    """Make scores of questions in parts of a split, of which more are lost at each lower ratio."""
    splits = [{"task_type": values[int(generator.integers(len(values)))]} for _ in range(n_questions)]
    full = generator.integers(0, 2, n_questions).astype(float)
    arms = {("none", 1.0): full.tolist()}
    for ratio, share in zip(RATIOS, (0.02, 0.08, 0.5), strict=True):
        arms["gstep", ratio] = np.where(generator.random(n_questions) < share, 0.0, full).tolist()
    return table_of(arms, clusters=clusters_of(n_questions, per_video), splits=splits)


def plain_differences(table, title, parts, by, ratio, draws):
    """Return the difference of GSTEP at a ratio to full retention and its draws, question by question.

    Args:
        parts: of the split, whose questions are of the kind.
        by: whether the parts are averaged first.
    """
    rows = table.to_pylist()
    pruned = {row["question_id"]: row["score"] for row in rows if row["retention_ratio"] == ratio}
    by_video = {}
    for row in rows:
        if row["method"] == "none":
            (part,) = dict(row["splits"]).values()
            lost = [(part if by else "", pruned[row["question_id"]] - row["score"])] if part in parts else []
            by_video.setdefault(row["cluster"], []).extend(lost)
    videos = sorted(by_video)

    def number(drawn):
        by_part = {}
        for part, difference in (one for video in drawn for one in by_video[video]):
            by_part.setdefault(part, []).append(difference)
        return sum(sum(of_one) / len(of_one) for of_one in by_part.values()) / len(by_part), set(by_part)

    generator = np.random.default_rng([0, crc32(title.encode())])
    picks = generator.integers(len(videos), size=(draws, len(videos)))
    value, present_parts = number(videos)
    drawn = [number([videos[i] for i in of_one]) for of_one in picks]
    assert all(present == present_parts for _, present in drawn)
    return value, [one for one, _ in drawn]


def plain_outcome(values, draws, within):
    """Return the outcome of a ratio by its differences on each task, and its interval."""
    value = 100 * sum(values) / len(values)
    means = sorted(100 * sum(of_tasks) / len(of_tasks) for of_tasks in zip(*draws, strict=True))
    low, high = (means[ceil(share * len(means)) - 1] for share in (0.025, 0.975))
    if high < -within:
        return "loses", value, low, high
    if (high - low) / 2 > within:
        return "wide", value, low, high
    return ("passes" if low > -within else "may lose"), value, low, high


@pytest.mark.parametrize("within", [1.0, 4.0, 12.0])
def test_the_rule_is_that_of_a_plain_one(within):
    """On two benchmarks, one of which averages over tasks before the kind."""
    draws, generator = 60, np.random.default_rng(3)
    shapes = random_case(generator, 90, 3, ["count", "color", "shape"])
    mlvu = random_case(generator, 160, 4, ["count", "ego", "plotQA"])
    benchmarks = {"shapes": ScoredBenchmark("S", shapes), "mlvu-dev": ScoredBenchmark("M", mlvu, mean_over="task_type")}
    breaks = find_breaks(benchmarks, BUILT_IN, within=within, draws=draws)
    assert [kind.name for kind in breaks.kinds] == ["counting", "general"]
    for verdict in breaks.verdicts:
        parts = ["count"] if verdict.kind.name == "counting" else ["color", "shape", "ego", "plotQA"]
        safe, failed = None, False
        for loss in verdict.losses:
            of_tasks = [
                plain_differences(table, title, parts, by, loss.ratio, draws)
                for table, title, by in ((shapes, "S", False), (mlvu, "M", True))
            ]
            outcome, *numbers = plain_outcome(*zip(*of_tasks, strict=True), within)
            assert (loss.difference, loss.low, loss.high) == pytest.approx(numbers)
            assert loss.outcome == outcome
            failed = failed or outcome != "passes"
            safe = safe if failed else loss.ratio
        assert verdict.lowest_safe_ratio == safe


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("results")
    splits = {"task_type": "Counting Problem", "duration": "short"}
    first = steady({**falling("gstep", 0, 1, 2), **falling("fps", 3, 0, 0)}, **splits)
    second = steady({**falling("gstep", 0, 0, 0), **falling("fps", 0, 0, 0)}, 19, task_type="order")
    return [leave_results(tmp_path, "videomme", first), leave_results(tmp_path, "mlvu-dev", second)]


def test_the_section_stands_in_every_form_of_what_results_lays_out(tmp_path, places, capsys):
    table = tmp_path / "abilities.csv"
    table.write_text("benchmark,split,value,ability\nmlvu-dev,task_type,order,my|kind\nother,,,OCR\n")
    out = tmp_path / "out"
    options = ["--within", "3", "--abilities", str(table), "--draws", "100", "--json"]
    assert evaluate.main(["--results", *places, "--out", str(out), *options]) == 0
    printed = capsys.readouterr().out
    (record,) = json.loads((out / "tables.json").read_text())
    section = record["where_it_breaks"]
    assert json.loads(printed)["where_it_breaks"] == section
    assert [line["kind"] for line in section["kinds"]] == ["counting", "my|kind"] and section["within"] == 3
    lines = {(line["kind"], line["method"]): (line["lowest_safe_ratio"], line["reason"]) for line in section["lines"]}
    assert lines == {
        ("counting", "gstep"): (0.25, "at 10% it loses 4.0 points [-4.0, -4.0]"),
        ("counting", "fps"): (None, "no tested ratio is safe: at 50% it loses 6.0 points [-6.0, -6.0]"),
        ("my|kind", "gstep"): (None, "19 videos"),
        ("my|kind", "fps"): (None, "19 videos"),
    }
    unused = f"{table}, line 3: there are no results of a benchmark 'other'; the benchmarks are videomme, mlvu-dev."
    assert unused in section["notes"]
    md = (out / "tables.md").read_text().replace("\\", "")
    assert "| counting | GSTEP | **25%** (at 10% it loses 4.0 points [-4.0, -4.0]) | 50%: no change; " in md
    assert "| my|kind | FPS | **cannot be told** (19 videos) | 50%: 0.0; 25%: 0.0; 10%: 0.0 |" in md
    page = Page((out / "report.html").read_text())
    assert page.open == []
    texts = page.texts[page.texts.index("Where it breaks") :]
    assert "at 10% it loses 4.0 points [-4.0, -4.0]" in texts and "cannot be told: 19 videos" in texts
    assert "Nothing is corrected for the 2 kinds and 2 methods" in " ".join(texts) and unused in texts
    assert unused in md and "VideoMME (1,000 questions, 20 videos)" in md


def test_the_picture_has_a_point_for_each_number_and_the_limit_as_a_band(tmp_path, places, capsys):
    out = tmp_path / "out"
    assert evaluate.main(["--results", *places, "--out", str(out), "--draws", "100"]) == 0, capsys.readouterr().err
    html = (out / "report.html").read_text()
    panels = re.findall(r'<div class="panel">(.*?)</svg>', html, re.S)
    assert [re.search(r"<h3>(.*)</h3>", panel)[1] for panel in panels] == ["counting", "order"]
    assert [panel.count("<circle") for panel in panels] == [6, 0] and panels[0].count('class="hollow"') == 5
    ticks = {label: float(y) for y, label in re.findall(r'y="([\d.]+)" text-anchor="end">([-+\d]+)<', panels[0])}
    step = (ticks["-6"] - ticks["0"]) / 6
    band = re.search(r'class="band" x="\d+" y="([\d.]+)" width="\d+" height="([\d.]+)"', panels[0])
    assert float(band[1]) == pytest.approx(ticks["0"] - 4, abs=0.11)
    assert float(band[2]) == pytest.approx(2 * step, abs=0.11)
    lowest = re.search(r'cy="([\d.]+)" r="3.5" class="hollow"><title>FPS at 50%: -6.0 \[-6.0, -6.0\]', panels[0])
    assert float(lowest[1]) == pytest.approx(ticks["-6"] - 4, abs=0.11)


def test_results_of_one_benchmark_have_the_section_and_its_options_go_with_results_alone(tmp_path, places, capsys):
    assert evaluate.main(["--results", places[0], "--out", str(tmp_path / "out"), "--draws", "100"]) == 0
    said = capsys.readouterr().out
    assert "Where it breaks" in said and "lowest safe ratio" in said and "###" not in said
    results = ["--results", places[0]]
    for given, option, value, why in (
        (["--benchmark", "shapes"], "--within", "1", "goes with --results"),
        (["--benchmark", "shapes"], "--abilities", "a.csv", "goes with --results"),
        (results, "--within", "0", "--within"),
        (results, "--abilities", str(tmp_path / "none.csv"), "--abilities"),
    ):
        assert evaluate.main([*given, option, value, "--out", str(tmp_path / "x")]) == 2
        assert why in capsys.readouterr().err and not (tmp_path / "x").exists()


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
        ("mlvu-dev", {"task_type": "needle"}, "needle"),
        ("mvbench", {"task": "moving_count"}, "counting"),
        ("longvideobench", {"question_category": "SSS"}, "order"),
        ("questions.jsonl", {"split": "count"}, "general"),
        ("lmms:timelens_charades", {}, "grounding"),
        ("lmms:tempcompass_yes_no", {"dim": "order"}, "order"),
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
        (["a,,,order", "videomme,task_type,,order"], {}, "line 3: split and value go together"),
        (["videomme,a,b,c,d"], {}, "line 2: more cells than the header names"),
        ([], {}, "it has no row below the names of its columns"),
        (["videomme,order"], {"header": "benchmark,kind"}, "line 1: a .csv begins with the names of its columns"),
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
