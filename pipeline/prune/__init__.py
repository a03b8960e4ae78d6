"""The work of ``python -m jobs.prune``: videos in, a cache of pruned tokens out."""
