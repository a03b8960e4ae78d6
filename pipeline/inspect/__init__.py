"""Show what a cache or answers contain: a summary, the kept tokens of one video, or the progress of a run."""
