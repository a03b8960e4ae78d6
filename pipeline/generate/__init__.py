"""What ``python -m jobs.generate`` does: questions and cached tokens in, answers out; no video and no vision encoder."""
