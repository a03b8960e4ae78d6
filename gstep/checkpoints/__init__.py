"""What a model argument means: its files, its weights' identity and single tensors, before any model is built."""
