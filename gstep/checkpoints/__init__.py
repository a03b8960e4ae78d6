"""Checkpoints behind a model argument: files, identity and single tensors, read without building a model."""
