"""The picture of the selection's times."""

from jobs.benchmark.selection_plot import write_plot
from jobs.benchmark.selection_times import FormTime


def test_a_picture_has_a_panel_an_input(tmp_path):
    def width(*inputs):
        times = [
            FormTime(name, n, 0.25, n // 4, "plain", n * 1e-3, [], extrapolated=n > 200)
            for name in inputs
            for n in (100, 400)
        ]
        write_plot(times, "title", tmp_path / "times.png")
        png = (tmp_path / "times.png").read_bytes()
        assert png.startswith(b"\x89PNG\r\n\x1a\n")
        return int.from_bytes(png[16:20], "big")

    assert width("iid", "structured") > 1.5 * width("iid")
