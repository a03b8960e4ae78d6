"""What SigLIP gives besides tokens: evidence of its layers, its pooling head and its text tower."""
