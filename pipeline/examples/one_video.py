"""Prune one video and save a picture of the tokens that were kept: no Ray, no cache.

Run it by ``python pipeline/examples/one_video.py VIDEO``; it needs matplotlib (``pip install -e '.[benchmark]'``).
"""

import sys

import matplotlib.pyplot as plt

import pipeline

video = pipeline.encode_video(sys.argv[1], model="tiny", num_frames=8, retention_ratio=0.25)
print(f"{len(video.pruned.tokens)} of {video.pruned.n_total} tokens are kept, see kept.png")
plt.imsave("kept.png", video.picture())
