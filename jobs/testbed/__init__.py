"""``python -m jobs.testbed``."""
