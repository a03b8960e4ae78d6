"""Decoding alone, beside the time of other libraries for the same frames, and beside the least that is possible."""
