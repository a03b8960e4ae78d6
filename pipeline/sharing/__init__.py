"""Caches that are passed around: merged into one, compared with each other."""
