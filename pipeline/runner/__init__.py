"""Runs on Ray of any kind; the package knows neither videos nor questions.

Read it in this order:

- ``stream``: the loop of every run. ``job``: what a kind of run adds.
- ``execution``: one graph while it runs. ``shards``: its output. ``stages``: its workers. ``watchdog``: its stalls.
- ``worker_heartbeat``: what a worker reports. ``worker_reports``: the actor that collects the reports.
- ``claim``, ``run_record``, ``monitor``, ``progress``: what a run shows to others.
- ``cluster``: the Ray cluster that a run joins or starts.
- ``python_calls``: runs called from Python. ``removal``: shared by removals. ``token_source``: a cache as a source of
  Ray Data.
"""
