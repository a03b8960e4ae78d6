"""Caches made of other caches, without a video: recoded, pruned by another method, or merged."""
