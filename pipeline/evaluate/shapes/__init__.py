"""A benchmark of made-up videos, all of it from a seed: where and when a thing is seen is known; no model, no run."""
