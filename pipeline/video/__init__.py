"""A video file or a folder of frames -> the sampled frames, or a fault that says what is wrong; no Ray, no models."""
