"""Decoding alone, beside what other libraries take for the same frames, and beside the least that is possible."""
