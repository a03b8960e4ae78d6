"""The abilities that questions test, by a table from benchmarks and parts of their splits; users may extend it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.inputs.tables import UNREADABLE, BadRow, UserRow, read_rows

GENERAL = "general"  # the ability of a question that no rule matches
#: The built-in abilities in the order in which they are shown.
ABILITIES = ("grounding", "counting", "order", "hallucination", "OCR", "needle", GENERAL)
_COLUMNS = ("benchmark", "split", "value", "ability")
_NEEDS = "the columns benchmark,split,value,ability"
_EXAMPLE = "such as videomme,task_type,Counting Problem,counting"


@dataclass(frozen=True)
class AbilityRule:
    """A row of the table: the questions that it matches, and the ability that they test.

    Attributes:
        benchmark: a benchmark's name, or a pattern of names as of fnmatch: ``lmms:timelens_*``.
        split: a split of the benchmark; "" for all of its questions.
        value: the part of the split; "" where ``split`` is "".
        ability: one of ABILITIES, or a user's own.
        source: where the rule stands in a user's file; "" for a built-in one.
    """

    benchmark: str
    split: str
    value: str
    ability: str
    source: str = ""

    def matches_benchmark(self, name: str) -> bool:
        """Return True if the rule is about the benchmark of this name."""
        return fnmatchcase(name, self.benchmark)

    def matches_splits(self, splits: Mapping[str, str]) -> bool:
        """Return True if a question in these parts of its benchmark's splits is one that the rule is about."""
        return not self.split or splits.get(self.split) == self.value


def _rules(benchmark: str, split: str, values: Sequence[str], ability: str) -> list[AbilityRule]:
    """Return a rule for each of the values of a split."""
    return [AbilityRule(benchmark, split, value, ability) for value in values]


#: The built-in table; the first rule that matches a question counts.
BUILT_IN: Sequence[AbilityRule] = (
    *_rules("shapes", "domain", ["needle"], "needle"),
    *_rules("shapes", "task_type", ["count"], "counting"),
    *_rules("shapes", "task_type", ["order", "onset", "quarter"], "order"),
    *_rules("shapes", "task_type", ["sign"], "OCR"),
    *_rules("videomme", "task_type", ["Counting Problem"], "counting"),
    *_rules("videomme", "task_type", ["OCR Problems"], "OCR"),
    *_rules("videomme", "task_type", ["Temporal Perception", "Temporal Reasoning"], "order"),
    *_rules("mlvu-*", "task_type", ["count"], "counting"),
    *_rules("mlvu-*", "task_type", ["order"], "order"),
    *_rules("mlvu-*", "task_type", ["needle", "needleQA"], "needle"),
    *_rules("mvbench", "task", ["action_count", "moving_count"], "counting"),
    *_rules("mvbench", "task", ["character_order", "action_sequence", "scene_transition"], "order"),
    *_rules("mvbench", "task", ["action_localization"], "grounding"),
    *_rules("longvideobench", "question_category", ["E3E", "O3O", "SSS", "T3E", "T3O"], "order"),
    AbilityRule("lmms:temporal_grounding_charades", "", "", "grounding"),
    AbilityRule("lmms:timelens_*", "", "", "grounding"),
    *_rules("lmms:vsibench*", "question_type", ["object_counting"], "counting"),
    *_rules("lmms:vsibench*", "question_type", ["obj_appearance_order"], "order"),
    *_rules("lmms:tempcompass_*", "dim", ["order"], "order"),
    AbilityRule("lmms:vinoground", "", "", "order"),
    AbilityRule("lmms:countix", "", "", "counting"),
    AbilityRule("lmms:repcount", "", "", "counting"),
    AbilityRule("lmms:pushupbench", "", "", "counting"),
    AbilityRule("lmms:cgav_counting*", "", "", "counting"),
)


def read_ability_rules(path: str) -> list[AbilityRule]:
    """Read the rules of a user's .csv with the columns benchmark, split, value and ability, in the file's order.

    An ability that differs from a built-in one in upper and lower case alone is the built-in one. Raises UsageError
    that names the file, the row and the remedy.
    """
    if not path.casefold().endswith(".csv"):
        raise UsageError(f"--abilities {path}: name a .csv with {_NEEDS}")
    try:
        with Path(path).open("rb") as file:
            rules = [_read_rule(f"{path}, {place}", row) for place, row in read_rows(path, file, _NEEDS, "ability")]
    except BadRow as error:
        raise UsageError(f"--abilities {error}; write {_NEEDS}, {_EXAMPLE}") from error
    except UNREADABLE as error:
        raise UsageError(f"--abilities {path}: cannot be read: {error}; name a .csv with {_NEEDS}") from error
    if not rules:
        raise UsageError(f"--abilities {path}: it has no row below the names of its columns; write rows {_EXAMPLE}")
    return rules


def _read_rule(where: str, row: UserRow) -> AbilityRule:
    """Convert a row of a user's file to a rule; ``where`` begins the message of the BadRow that is raised otherwise."""
    if unknown := [name for name in row if name not in _COLUMNS]:
        raise BadRow(f"{where}: there is no column {unknown[0]!r}")
    benchmark, split, value, ability = (str(row.get(name) or "").strip() for name in _COLUMNS)
    if not benchmark or not ability:
        raise BadRow(f"{where}: {'ability' if benchmark else 'benchmark'} is empty")
    if bool(split) != bool(value):
        raise BadRow(f"{where}: split and value go together (both empty: the whole benchmark)")
    built_in = {name.casefold(): name for name in ABILITIES}
    return AbilityRule(benchmark, split, value, built_in.get(ability.casefold(), ability), where)


def classify_questions(rules: Sequence[AbilityRule], name: str, splits: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the ability that each question tests: that of the first rule that matches it, else GENERAL.

    Args:
        rules: the table, a user's rules before the built-in ones.
        name: of the benchmark.
        splits: of each question: the benchmark's split -> the part of it.
    """
    rules = [rule for rule in rules if rule.matches_benchmark(name)]
    return [next((rule.ability for rule in rules if rule.matches_splits(of_one)), GENERAL) for of_one in splits]


def order_abilities(present: Sequence[str]) -> list[str]:
    """Return abilities without repetition in the order of ABILITIES, with a user's own ones before GENERAL."""
    own = [ability for ability in dict.fromkeys(present) if ability not in ABILITIES]
    return [ability for ability in (*ABILITIES[:-1], *own, GENERAL) if ability in present]


def list_unused_rules(rules: Sequence[AbilityRule], splits: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """Return a line about each rule of a user's file that is about no question of the results.

    Args:
        rules: the table; built-in rules are ignored.
        splits: a benchmark's name -> the splits of each of its questions.
    """
    lines = []
    for rule in rules:
        names = [name for name in splits if rule.matches_benchmark(name)]
        if not rule.source or any(rule.matches_splits(of_one) for name in names for of_one in splits[name]):
            continue
        what = f"no question of {', '.join(names)} has {rule.split}={rule.value}"
        if not names:
            what = f"no results are of a benchmark {rule.benchmark!r}; there are {', '.join(splits)}"
        lines.append(f"{rule.source}: {what}")
    return lines
