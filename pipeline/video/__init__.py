"""Decode a video file or a folder of frames to the sampled frames, or to a fault with its reason; no Ray, no models."""
