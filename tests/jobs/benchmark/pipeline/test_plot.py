"""The picture of the whole job."""

from jobs.benchmark.pipeline.plot import write_plot
from tests.jobs.benchmark.pipeline.runs import cell


def width(path, cells):
    write_plot(cells, "a title", path)
    png = path.read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(png[16:20], "big")


def test_a_picture_grows_with_the_cells(tmp_path):
    one = cell(loop=16, job=12, single=10, decode=30)
    assert width(tmp_path / "four.png", [one] * 4) > width(tmp_path / "two.png", [one] * 2)


def test_nodes_are_drawn_without_a_loop(tmp_path):
    assert width(tmp_path / "nodes.png", [cell(1, 1, job=10), cell(2, 2, job=18)]) > 0
