"""A video file or folder of frames -> the sampled frames, or a fault that says what is wrong; no Ray, Parquet, models."""
