"""Print the Grafana dashboard of runs: ``python jobs/cluster/dashboard.py > jobs/cluster/dashboard.json``.

It needs ``pip install grafana-foundation-sdk``; dashboard.json, which Grafana imports, is its output.
"""

from __future__ import annotations

from typing import NamedTuple

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef

_SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
_ROWS = "sum by (run) (rate(ray_gstep_rows_total[5m]))"


class Graph(NamedTuple):
    """A panel: its title, its unit in Grafana's words, its query, and the legend of each series of that."""

    title: str
    unit: str
    query: str
    legend: str


GRAPHS = (
    Graph(
        "Rows a second", "short", "sum by (run, item, status) (rate(ray_gstep_rows_total[5m]))", "{{run}} {{status}}"
    ),
    Graph("Time left", "s", f"sum by (run) (ray_gstep_items_left) / {_ROWS}", "{{run}}"),
    Graph("Busy share of workers", "percentunit", "ray_gstep_busy_share", "{{run}} {{stage}}"),
    Graph("Items to do or in hand", "short", "ray_gstep_queue", "{{run}} {{stage}}"),
    Graph(
        "Seconds a video",
        "s",
        f"sum by (run, stage) (rate(ray_gstep_stage_seconds_total[5m])) / on (run) group_left () {_ROWS}",
        "{{run}} {{stage}}",
    ),
    Graph(
        "Failures a minute",
        "short",
        "60 * sum by (run, stage, node, class) (rate(ray_gstep_failures_total[5m]))",
        "{{class}} in {{stage}} on {{node}}",
    ),
    Graph("Since the last row", "s", "time() - ray_gstep_last_row_time", "{{run}}"),
    Graph("Items left", "short", "ray_gstep_items_left", "{{run}}"),
    Graph("Tokens a second", "short", "sum by (run, kind) (rate(ray_gstep_tokens_total[5m]))", "{{run}} {{kind}}"),
    Graph("Bytes a second", "Bps", "sum by (run, kind) (rate(ray_gstep_bytes_total[5m]))", "{{run}} {{kind}}"),
)


def dashboard() -> str:
    """Return the dashboard as JSON, for Grafana to import."""
    page = Dashboard("gstep-cache").uid("gstep-cache").refresh("30s").time("now-3h", "now")
    page = page.with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
    for graph in GRAPHS:
        query = Dataquery().expr(graph.query).legend_format(graph.legend).ref_id("A").datasource(_SOURCE)
        panel = TimeSeries().title(graph.title).unit(graph.unit).min(0).datasource(_SOURCE).with_target(query)
        below = (
            VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        )
        page = page.with_panel(panel.legend(below))
    text: str = JSONEncoder(sort_keys=True, indent=2).encode(page.build())
    return text


if __name__ == "__main__":
    print(dashboard())
