"""Checkpoints behind a model argument: files, the identity of weights and single tensors, before any model is built."""
