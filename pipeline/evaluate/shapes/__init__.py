"""A benchmark of synthetic videos made from seeds, for which the position and time of every thing are known."""
