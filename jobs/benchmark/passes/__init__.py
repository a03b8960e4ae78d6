"""Measure what it gains to encode several short videos in one pass of the vision tower."""
