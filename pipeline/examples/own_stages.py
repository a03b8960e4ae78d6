"""Put decoding and encoding into a Ray Data pipeline of your own, and print what was kept of each video in a folder.

Run it by ``python pipeline/examples/own_stages.py FOLDER``. With GPUs give encoders ``num_gpus=1`` instead of CPUs.
"""

import sys
from pathlib import Path

import ray
import torch

import pipeline

paths = sorted(Path(sys.argv[1]).resolve().glob("*.mp4"))
videos = ray.data.from_items([{"video_id": path.name, "uri": str(path)} for path in paths])
stages = pipeline.prune_stages(model="tiny", num_frames=4, retention_ratio=0.25)
one = ray.data.ActorPoolStrategy(size=1)
how = {"fn_constructor_args": (stages,), "batch_format": "pyarrow", "compute": one}
frames = videos.map_batches(pipeline.DecodeVideos, batch_size=4, num_cpus=1, **how)
tokens = frames.map_batches(pipeline.EncodeVideos, batch_size=1, num_cpus=0.5, **how)
for row in tokens.iter_rows():
    if row["status"] == "ok":
        kept = torch.frombuffer(bytearray(row["tokens"]), dtype=torch.bfloat16).view(-1, row["hidden_size"])
        print(row["video_id"], tuple(kept.shape), row["index"][:3])
    else:
        print(row["video_id"], row["error_class"], row["error_message"])
