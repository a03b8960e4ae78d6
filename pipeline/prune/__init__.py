"""The work of ``python -m jobs.prune``: it turns videos into a cache of pruned tokens."""
