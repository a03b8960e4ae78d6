"""jobs.testbed compare: what it counts, how it adjusts, what it refuses."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from jobs.testbed.__main__ import main
from jobs.testbed.comparing import compare
from pipeline.errors import UsageError
from pipeline.evaluate.statistics import arm_by_row, holm
from tests.pipeline.evaluate.score_tables import score_rows, score_table

VIDEOS, EACH = 40, 5
CLUSTERS = [f"v{i // EACH}" for i in range(VIDEOS * EACH)]
SPLITS = [{"domain": "pan" if i // EACH % 2 else "plain"} for i in range(VIDEOS * EACH)]


def table():
    """Ours is right where the better rival is and at the first question of each pan video; the other is never right."""
    rng = np.random.default_rng(0)
    rival = rng.integers(0, 2, VIDEOS * EACH).astype(float)
    rival[::EACH] = 0
    pan = np.array([split["domain"] == "pan" for split in SPLITS])
    ours = np.maximum(rival, pan & (np.arange(VIDEOS * EACH) % EACH == 0))
    arms = {("none", 1.0): np.ones(VIDEOS * EACH)}
    for ratio in (0.25, 0.1):
        arms |= {("ours", ratio): ours, ("rival", ratio): rival, ("nothing", ratio): 0 * rival}
    made = {name: score_rows(*name, scores.tolist(), clusters=CLUSTERS, splits=SPLITS) for name, scores in arms.items()}
    return score_table(*made.values())


def test_differences_are_of_the_same_questions_in_each_part():
    found = compare(table(), "ours", None, "domain", draws=2000)
    assert found.asked == {"all": (200, 40), "pan": (100, 20), "plain": (100, 20)}
    assert len(found.compared) == 2 * 2 * 3
    by = {(one.part, one.ratio, one.other): one for one in found.compared}
    pan, plain, everywhere = (by[part, 0.1, "rival"] for part in ("pan", "plain", "all"))
    assert pan.by.value == pytest.approx(0.2) and math.isnan(pan.by.low)  # one of five, in every video: no spread
    assert plain.by.value == 0 and math.isnan(plain.by.p)
    assert everywhere.by.value == pytest.approx(0.1) and everywhere.by.low < 0.1 < everywhere.by.high
    assert found.scores["pan", "ours", 0.1] - found.scores["pan", "rival", 0.1] == pytest.approx(20)
    assert found.scores["all", "none", 1.0] == 100


def test_p_is_adjusted_for_all_comparisons_at_once():
    found = compare(table(), "ours", ["rival", "nothing"], "domain", draws=500)
    adjusted = holm([one.by.p for one in found.compared])
    assert [one.p_holm for one in found.compared] == pytest.approx(adjusted, nan_ok=True)
    alone = compare(table(), "ours", ["rival"], "domain", draws=500)
    assert all(one.other == "rival" for one in alone.compared) and len(alone.compared) == 6
    of_all = {one[:3]: one.p_holm for one in found.compared}
    less, more = zip(*((one.p_holm, of_all[one[:3]]) for one in alone.compared if one.p_holm > 0), strict=True)
    assert less < more and all(a <= b for a, b in zip(less, more, strict=True))


def test_it_writes_tables_and_prints_them(tmp_path, capsys):
    pq.write_table(table(), tmp_path / "scores.parquet")
    argv = ["compare", str(tmp_path), "--method", "ours", "--draws", "2000", "--out", str(tmp_path / "t.md")]
    assert main(argv) == 0
    text = (tmp_path / "t.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "# ours against rival, nothing" in text and "all 12 comparisons" in text
    assert "| pan (100) | 100.0 |" in text and "+20.0 (no interval)" in text
    assert "| plain (100) |" in text and "+0.0 (no interval)" in text


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("mine", None, "domain"), "mine was not evaluated there; there are none, ours, rival, nothing"),
        (("ours", ["vidcom2"], "domain"), "vidcom2 was not evaluated there"),
        (("ours", None, "length"), "--split length: the questions have no such split; they have domain"),
    ],
)
def test_what_the_scores_do_not_have_is_refused(asked, said):
    with pytest.raises(UsageError, match=said):
        compare(table(), *asked, draws=10)


def test_a_rival_that_lacks_a_ratio_has_a_dash_there(tmp_path, capsys):
    """As where jobs.evaluate --score compares answers at unlike ratios."""
    full = table()
    lacking = [method != "rival" or ratio != 0.1 for method, ratio in arm_by_row(full)]
    pq.write_table(full.filter(pa.array(lacking)), tmp_path / "scores.parquet")
    assert main(["compare", str(tmp_path), "--method", "ours", "--draws", "100"]) == 0
    assert "| rival | 41.5 | – |" in capsys.readouterr().out


def test_a_part_of_any_name_stays_one_cell(tmp_path, capsys):
    full = table()
    parts = pa.array([[("domain", "A|B <i>")]] * len(full), full["splits"].type)
    place = full.schema.get_field_index("splits")
    pq.write_table(full.set_column(place, "splits", parts), tmp_path / "scores.parquet")
    assert main(["compare", str(tmp_path), "--method", "ours", "--draws", "100"]) == 0
    assert r"| A\|B \<i\> (200) | 100.0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda full: full.filter(pc.field("method") != "rival").filter(pc.field("method") != "nothing"), "no other"),
        (lambda full: full.set_column(8, "score", pa.nulls(len(full), pa.float64())), "without a score"),
        (lambda full: full.set_column(2, "splits", pa.array([[]] * len(full), full["splits"].type)), "they have none"),
        (lambda full: full.drop_columns(["status"]), "has no status as it should be"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(tmp_path, capsys, change, said):
    pq.write_table(change(table()), tmp_path / "scores.parquet")
    assert main(["compare", str(tmp_path), "--method", "ours", "--draws", "100"]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_damaged_scores_are_refused(tmp_path, capsys):
    (tmp_path / "scores.parquet").write_bytes(b"PAR1")
    assert main(["compare", str(tmp_path), "--method", "ours"]) == 2
    assert "scores.parquet is damaged" in " ".join(capsys.readouterr().err.split())


def test_a_folder_without_scores_is_refused(tmp_path: Path, capsys):
    assert main(["compare", str(tmp_path), "--method", "ours"]) == 2
    assert "holds no scores.parquet" in " ".join(capsys.readouterr().err.split())
