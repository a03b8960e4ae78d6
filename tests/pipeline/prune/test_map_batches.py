"""The stages as callables: rows in, the rows of a cache's dataset out, whatever the videos are."""

import json

import pyarrow as pa
import pytest
import torch

import pipeline
from tests.builders.clips import sample

CLIP = str(sample("bikes.mp4"))
OPTIONS = {"num_frames": 3, "retention_ratio": 0.2, "device": "cpu"}


def encoded(stages: pipeline.PruneStages, videos: list[dict]) -> pa.Table:
    decode, encode = pipeline.DecodeVideos(stages), pipeline.EncodeVideos(stages)
    names = dict.fromkeys(name for video in videos for name in video)
    batches = list(decode(pa.table({name: [video.get(name) for video in videos] for name in names})))
    rows = pa.concat_tables([row for batch in batches for row in encode(batch)])  # of one schema, or this raises
    decode.close()
    return rows


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen3-vl"])
def test_a_good_video_is_a_row_of_tokens_and_a_bad_one_says_why(model, tmp_path):
    (tmp_path / "text.mp4").write_text("this is no video\n" * 50)
    videos = [
        {"video_id": "bad", "uri": str(tmp_path / "text.mp4"), "topic": "none"},
        {"video_id": "good", "uri": CLIP, "start_s": 1.0, "topic": "bikes"},
        {"video_id": "web", "uri": "https://example.org/a.mp4"},
    ]
    bad, good, web = encoded(pipeline.prune_stages(model=model, **OPTIONS), videos).to_pylist()
    expected = pipeline.encode_video(CLIP, start_s=1.0, model=model, **OPTIONS)
    pruned = expected.pruned
    tokens = torch.frombuffer(bytearray(good["tokens"]), dtype=torch.bfloat16).view(-1, good["hidden_size"])
    assert torch.equal(tokens.view(torch.int16), pruned.tokens.view(torch.int16))
    assert (good["index"], good["rank"]) == (pruned.index.tolist(), pruned.rank.tolist())
    row = json.loads(good["metadata"])
    assert good["frame"] == [i // row["tokens_per_frame"] for i in good["index"]] and good["merged"] is None
    assert (row["manifest"], row["timestamps"]) == ({"topic": "bikes"}, expected.timestamps)
    assert ("deepstack_0" in good) == (model == "tiny-qwen3-vl")
    assert (good["status"], good["error_class"]) == ("ok", None)
    assert (bad["status"], bad["error_class"], bad["tokens"]) == ("failed", "unsupported", None)
    assert web["error_class"] == "policy" and json.loads(bad["metadata"])["manifest"] == {"topic": "none"}
