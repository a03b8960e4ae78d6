"""Work out what is shown of the whole job, and show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from jobs.benchmark.pipeline.measure import Figures
from jobs.benchmark.pipeline.work import DECODE, FRAME_BYTES, JOB, LOOP, Work

_CPU = "CPU "
_IDLE = "in _Fetcher.next"  # the function in which the driver waits for videos
OF_JOB = f"{JOB}, CPU ms: "  # a kind of process


def cell(work: Work, found: Mapping[str, Figures], first: Figures | None = None) -> dict[str, float]:
    """Compute the derived figures of one combination of frames, encoder seconds and nodes.

    ``found`` is by kind of work; ``first`` is the cell of the fewest nodes, which scaling is compared with.
    """
    shown = {"MB": work.frames * FRAME_BYTES / 1e6, "encode ms": 1e3 * work.work_s, "nodes": work.nodes or 1}
    speeds = {kind: 1 / figures["seconds"] for kind, figures in found.items()}
    for kind, speed in speeds.items():
        shown[f"{kind}, videos/s"] = speed
        if kind != DECODE:  # by what an encoder is to take, never by a clock around it
            shown[f"{kind}, busy"] = speed * work.work_s / work.encoders
    if LOOP in found:
        shown[f"job / {LOOP}"] = speeds[JOB] / speeds[LOOP]
    if DECODE in found:
        shown["slowest stage alone, videos/s"] = min(work.encoders / work.work_s, speeds[DECODE])
        shown["job / slowest stage"] = speeds[JOB] / shown["slowest stage alone, videos/s"]
    if first:
        shown["job / nodes x the first"] = speeds[JOB] / (first[f"{JOB}, videos/s"] * work.nodes / first["nodes"])
    for kind in (kind for kind in (JOB, LOOP) if kind in found):
        by_process = {name: 1e3 * used for name, used in found[kind].items() if name.startswith(_CPU)}
        shown[f"{kind}, peak MB (PSS)"] = found[kind]["peak MB"]
        shown[f"{kind}, CPU ms a video"] = sum(by_process.values())
        shown |= {f"{kind}, CPU ms: {name.removeprefix(_CPU)}": used for name, used in by_process.items()}
    return shown | {f"{name} a video": found[JOB][name] for name in ("store MB", "store objects")}


def form_line(found: Figures, folder: Figures) -> str:
    """Return what a video more takes in a form, beside the same video as a file in a folder, in one line."""

    def core_s(figures: Figures) -> float:
        return sum(used for name, used in figures.items() if name.startswith(_CPU))

    shown = f"{1e3 * found['seconds']:.1f} ms a video ({found['seconds'] / folder['seconds']:.2f} of the folder's)"
    shown += f", {1e3 * core_s(found):.1f} core ms ({core_s(found) / core_s(folder):.2f})"
    told = ("GETs", "HEADs", "LISTs", "sent MB", "fetched MB") if "GETs" in found else ()
    return ", ".join([shown, *(f"{found[kind]:.3f} {kind}" for kind in told if kind in found)])


def simulation_line(one: Figures) -> str:
    """Return what the driver reaches with so many simulated encoders, and where its time goes, in one line."""
    spent = sorted(
        ((share, name) for name, share in one.items() if name.startswith("in ") and name != _IDLE), reverse=True
    )
    return (
        f"{one['encoders']} encoders: {one['reached']:.0f} videos/s of {one['offered']:.0f} offered; "
        f"{one['driver CPU ms']:.2f} CPU ms of the driver a video; a tick that commits {1e3 * one['tick']:.0f} ms, "
        f"1 in 100 {1e3 * one['slow tick']:.0f} ms; the driver {one['driver MB']:.0f} MB; "
        f"{one['reports read']:.0f} of {one['reports sent']:.0f} reports/s read, each "
        f"{1e3 * one['CPU heartbeat actor'] / (one['reports read'] * one['seconds']):.2f} CPU ms; "
        f"it waits for videos {100 * one.get(_IDLE, 0.0):.0f} % of the time, most of the rest is "
        + ", ".join(f"{name} {100 * share:.0f} %" for share, name in spent[:3])
    )


def as_table(cells: Sequence[Figures], title: str) -> Table:
    """Return a table of figures with a column for each combination that was measured."""
    table = Table(title=title, title_justify="left", show_edge=False, show_header=False)
    for name in dict.fromkeys(name for one in cells for name in one):
        shown = ((one[name], 2 if abs(one[name]) < 10 else 1) if name in one else None for one in cells)
        table.add_row(name, *("" if one is None else f"{one[0]:,.{one[1]}f}" for one in shown))
    return table
