"""The checkpoints that model arguments name: files, identity and single tensors, read without building a model."""
