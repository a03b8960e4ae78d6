"""The simulation beside measured runs: the figures that the page of plans shows are those that it gives."""

import re

import pytest

from pipeline.plan.simulate import Stages, simulate
from tests.paths import ROOT

# Frames, ms of encoding, decoders, encoders, videos, second at which the last node is lost; seconds measured.
RUNS = (
    (32, 15, 1, 1, 1000, None, 38.7), (2, 250, 4, 4, 320, None, 42.4), (2, 60, 2, 2, 700, 12.0, 58.1),
    (2, 250, 2, 2, 160, 12.0, 48.6), (32, 250, 1, 1, 80, None, 27.4), (120, 1, 1, 1, 160, None, 27.9),
    (32, 30, 1, 1, 500, None, 28.5), (16, 60, 1, 1, 300, None, 31.7), (8, 15, 1, 1, 700, None, 23.7),
    (8, 30, 2, 1, 600, None, 37.4), (120, 1, 1, 1, 32, None, 21.5),
)  # fmt: skip
PAGE = re.findall(r"^\| \d+ frames, .* \| ([\d.]+) \| ([\d.]+) \| [+-]\d+ % \|$",
                  (ROOT / "pipeline/plan/README.md").read_text(), re.MULTILINE)  # fmt: skip


def predicted(frames, ms, decoders, encoders, videos, lost_at) -> float:
    """Return the simulated seconds; the CPU seconds of 2 and 32 frames are those of the runs that were fitted."""
    start, more = 2 + 1.5 * (decoders + 2 * encoders), (frames - 2) / 30
    few, many = (2.53e-3, 0.22e-3, 2.08e-3), (13.5e-3, 1.7e-3, 15.2e-3)  # decoding, driver, the rest
    decode_s, driver_s, host_s = (2 * (a + (b - a) * more) for a, b in zip(few, many, strict=True))
    bundle = max(1, min(32, int(64 * 2**20 / (frames * 442_368)), videos // (16 * (decoders + encoders))))
    stages = Stages(
        videos=videos, decoders=decoders, encoders=encoders, nodes=encoders, cores=2, bundle=bundle, decode_s=decode_s,
        encode_s=ms / 1e3, host_s=host_s, driver_s=driver_s, lost={} if lost_at is None else {1: lost_at - start},
    )  # fmt: skip
    return start + simulate(stages)


@pytest.mark.parametrize(("run", "shown"), [*zip(RUNS, PAGE, strict=True)], ids=str)
def test_the_page_shows_what_was_measured_and_what_is_simulated(run, shown):
    assert shown == (str(run[-1]), f"{predicted(*run[:-1]):.1f}")


def test_six_of_eleven_runs_are_within_fifteen_percent():
    off = [predicted(*run[:-1]) / run[-1] - 1 for run in RUNS]
    assert sum(abs(one) < 0.155 for one in off) == 6 and max(off) < 0.05
