"""One cache made of another, without a video: by another codec, or pruned by another method."""
