"""What ``python -m jobs.evaluate`` does: score pruning methods on benchmarks from one encode."""
