"""The picture of the whole job."""

from jobs.benchmark.pipeline.plot import write_plot
from jobs.benchmark.pipeline.report import cell
from jobs.benchmark.pipeline.work import DECODE, JOB, LOOP, SINGLE, Work
from tests.jobs.benchmark.pipeline.test_report import took


def width(path, cells):
    write_plot(cells, "a title", path)
    png = path.read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big")


def test_a_picture_grows_with_the_cells(tmp_path):
    one = cell(Work("", 2, 0.05, 1), {kind: took(0.1) for kind in (LOOP, JOB, SINGLE, DECODE)})
    assert width(tmp_path / "four.png", [one] * 4) > width(tmp_path / "two.png", [one] * 2)


def test_nodes_are_drawn_without_a_loop(tmp_path):
    assert width(tmp_path / "nodes.png", [cell(Work(JOB, 2, 0.05, 2, 2, 2), {JOB: took(0.1)})]) > 0
