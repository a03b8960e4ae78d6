"""SigLIP beside the tokens: evidence of its layers, its pooling head and its text tower."""
