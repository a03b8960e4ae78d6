"""One video file -> the sampled frames, or a fault that says what is wrong with it; no Ray, no Parquet, no models."""
