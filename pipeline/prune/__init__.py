"""What ``python -m jobs.prune`` does: videos in, a cache of pruned tokens out."""
