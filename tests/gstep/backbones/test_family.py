"""What a family answers before any weight is read: evidence that it cannot give, limits that it does not have."""

import pytest

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from gstep.evidence import POOLING_HEAD
from tests.gstep.backbones.encoders import AT_LAST, FLOAT32, MERGED, STOCK, frames_for

OF_HEAD = {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}


@pytest.mark.parametrize("model", STOCK)
def test_what_an_encoder_cannot_give_is_refused(model):
    source = ModelSource.resolve(model)
    with pytest.raises(ModelError, match=f"{source.model_type} does not give llm_attention from the language model"):
        family_of(source).load(FLOAT32).encode(frames_for(source, 2), {"llm_attention": "the language model"})
    other = MERGED if model == "tiny" else AT_LAST
    with pytest.raises(ModelError, match=source.model_type):
        family_of(source).check_gives(other)


def test_a_family_with_one_size_has_no_limits():
    with pytest.raises(ModelError, match="one size"):
        family_of(ModelSource.resolve("tiny")).with_limits(None, 1000, None)


def test_who_needs_a_head_is_told_to_name_one():
    source = ModelSource.resolve("tiny")
    family_of(family_of(source).with_pooling_head("tiny")).check_evidence(OF_HEAD)
    for refuse in (
        lambda: family_of(source).check_evidence(OF_HEAD),
        lambda: family_of(source).load(FLOAT32).encode(frames_for(source, 2), OF_HEAD),
    ):
        with pytest.raises(ModelError, match=r"frame_feature, token_attention from SigLIP's .* --siglip"):
            refuse()
    for model in ("tiny-qwen2-5-vl", "tiny-qwen3-vl"):
        with pytest.raises(ModelError, match="for LLaVA-OneVision"):
            family_of(ModelSource.resolve(model)).with_pooling_head("tiny")
