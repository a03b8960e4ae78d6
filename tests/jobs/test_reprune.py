"""jobs.reprune beside real runs of jobs.prune; tests/pipeline/rewrite/test_recode.py has other methods, and codecs."""

import shutil

import pytest
import torch

from jobs import prune, reprune, verify
from pipeline import TokenCache
from tests.builders.clips import sample

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]
CLIPS = ["bikes.mp4", "carphone_pristine.mp4"]
EVIDENCE = ["--evidence", "fastvid", "--siglip", "tiny"]


def same(one, other):
    one, other = TokenCache(one), TokenCache(other)
    assert one.header == other.header and len(one) == len(other) == 2
    for name in one.video_ids:
        video, found = one.get(name, order="selection"), other.get(name, order="selection", verify=True)
        assert torch.equal(video.tokens.view(torch.int16), found.tokens.view(torch.int16))
        assert torch.equal(video.index, found.index)
        assert video.metadata["checksum"] == found.metadata["checksum"]
        assert video.metadata["temporal_density"] == found.metadata["temporal_density"]


def test_a_cache_of_all_tokens_becomes_what_runs_make(tmp_path):
    (tmp_path / "v").mkdir()
    for clip in CLIPS:
        shutil.copy(sample(clip), tmp_path / "v")
    argv = [str(tmp_path / "v"), "--num-frames", "4"]
    whole, made, again = (str(tmp_path / name) for name in ("whole", "made", "again"))
    assert prune.main([*argv, "--pruner", "none", "--retention-ratio", "1", "--out", whole, *EVIDENCE]) == 0
    method = ["--pruner", "fastvid", "--token-codec", "int4"]
    assert prune.main([*argv, *method, "--siglip", "tiny", "--out", made]) == 0
    assert reprune.main([whole, *method, "--out", again]) == 0
    same(made, again)
    assert prune.main([*argv, *method, "--siglip", "tiny", "--out", again]) == 0  # it finds nothing to do there
    for place in (made, again):
        assert verify.main([place, "--live", "2", "--video-root", "/"]) == 0
