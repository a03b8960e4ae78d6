"""What SigLIP gives besides tokens: evidence of its layers, the pooling head and the text tower that were published with it."""
