"""What ``python -m jobs.generate`` does: questions and cached tokens in, answers out. Needs no video."""
