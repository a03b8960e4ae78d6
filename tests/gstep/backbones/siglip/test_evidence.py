"""SigLIP beside LLaVA-OneVision: evidence of its tower and pooling head, and its text tower, against the stock ones."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import interpolate, scaled_dot_product_attention
from transformers import (
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from gstep.backbones import TextTower, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.source import DEFAULTS
from gstep.errors import ModelError
from gstep.evidence import LAST_LAYER, POOLING_HEAD, SINGLE_PATCHES
from tests.builders.checkpoints import merge
from tests.gstep.backbones.encoders import AT_LAST, BFLOAT16, FLOAT32, frames_for
from tests.gstep.reading import changed_json, changed_tensors, count_reading

OF_HEAD = {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}


@pytest.fixture
def frames(source):
    return frames_for(source, 3, (24, 24))


def with_head(source, siglip="tiny", runtime=FLOAT32, frame_batch=32):
    return family_of(family_of(source).with_pooling_head(siglip)).load(runtime, frame_batch=frame_batch)


def head_of(source, siglip):
    return family_of(source).with_pooling_head(siglip).pooling_head


def stock_tower(source, frames, **options):
    """Return the stock tower, and the pixels of the frames as it takes them."""
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(source.pretrained()[0], **options)
    return stock.model.vision_tower, family_of(source).preprocessor().normalise(frames, "cpu", torch.float32)


def pooled(values_TSE):
    """Bring values of 27 x 27 patches to the 14 x 14 tokens of a frame."""
    grid = values_TSE.reshape(len(values_TSE), 27, 27, -1).permute(0, 3, 1, 2)
    return interpolate(grid, (14, 14), mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)


@torch.no_grad()
def stock_last_layer(source, frames):
    """Attention [T,196] and keys [T,196,E] from the weights that the eager tower returns."""
    (tower, pixels), keys = stock_tower(source, frames, attn_implementation="eager"), []
    tower.encoder.layers[-1].self_attn.k_proj.register_forward_hook(lambda module, args, output: keys.append(output))
    weights_THSS = tower(pixels, output_attentions=True, return_dict=True).attentions[-1]
    assert weights_THSS.shape[1:] == (2, 729, 729)
    key_TSE = keys[0].view(len(frames), 729, 2, -1).mean(dim=2)
    return pooled(weights_THSS.mean(dim=(1, 2))).squeeze(2), pooled(key_TSE)


@torch.no_grad()
def stock_head(source, frames):
    """Return the stock head and its inputs, the features [T,S,C] of the stock tower behind the last norm."""
    tower, pixels = stock_tower(source, frames)
    features = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states[-1]
    config = json.loads((tiny.build("tiny-siglip") / "config.json").read_text())["vision_config"]
    stock = SiglipVisionModel(SiglipVisionConfig(**config)).eval()
    tensors = load_file(tiny.build("tiny-siglip") / "model.safetensors")
    prefix = "vision_model."
    state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    assert not stock.load_state_dict(state, strict=False).unexpected_keys
    return stock.head, stock.post_layernorm(features)


@torch.no_grad()
def stock_head_attention(head, normed_TSC):
    """Work the attention of the stock head out head by head, [T,196]."""
    attention, n_heads = head.attention, head.attention.num_heads
    weight_q, weight_k, _ = attention.in_proj_weight.chunk(3)
    bias_q, bias_k, _ = attention.in_proj_bias.chunk(3)
    query_HE = (head.probe[0, 0] @ weight_q.T + bias_q).view(n_heads, -1)
    key_TSHE = (normed_TSC @ weight_k.T + bias_k).unflatten(-1, (n_heads, -1))
    # Attention as what sdpa makes of the unit vectors as values.
    one_hot = torch.eye(normed_TSC.shape[1]).expand(len(normed_TSC), n_heads, -1, -1)
    query = query_HE[None, :, None].expand(len(normed_TSC), -1, -1, -1)
    weights_TS = scaled_dot_product_attention(query, key_TSHE.transpose(1, 2), one_hot).mean(dim=(1, 2))
    return pooled(weights_TS).squeeze(2)


def test_last_layer_of_llava_onevision_equals_eager_attention_weights(source):
    frames = frames_for(source)
    attention_TN, key_TNE = stock_last_layer(source, frames)
    assert attention_TN.std() > 0.1 * attention_TN.mean()  # of flat attention any mistake would look right
    for frame_batch in (32, 3, 1):
        evidence = family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames, AT_LAST).evidence
        assert evidence["token_attention"].shape == (5, 196) and evidence["token_key"].shape == (5, 196, 32)
        torch.testing.assert_close(evidence["token_attention"], attention_TN, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(evidence["token_key"], key_TNE, rtol=0, atol=1e-5)


@torch.no_grad()
def test_feature_attention_and_single_patches_equal_the_stock_head(source, frames):
    head, normed_TSC = stock_head(source, frames)
    feature_TC, attention_TN = head(normed_TSC), stock_head_attention(head, normed_TSC)
    single_TNC = pooled(head(normed_TSC.reshape(-1, 1, 64)).view(3, 729, 64))  # as pictures of one patch
    # Of flat attention and of equal patches any mistake would look right.
    assert attention_TN.std() > 0.1 * attention_TN.mean() and single_TNC.std(dim=1).mean() > 0.1
    for frame_batch in (32, 2):
        visual = with_head(source, frame_batch=frame_batch).encode(
            frames, {**OF_HEAD, "image_embedding": SINGLE_PATCHES}
        )
        torch.testing.assert_close(visual.evidence["token_attention"], attention_TN, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(visual.evidence["frame_feature"], feature_TC, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(visual.evidence["image_embedding"], single_TNC, rtol=1e-4, atol=1e-5)
        plain = family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames)
        assert torch.equal(visual.tokens, plain.tokens)


def test_evidence_of_a_bfloat16_tower_is_float32_and_one_name_from_two_places_is_two_things(source, frames):
    backbone = with_head(source, runtime=BFLOAT16)
    probe = backbone.encode(frames, OF_HEAD).evidence
    mixed = backbone.encode(frames, {"frame_feature": POOLING_HEAD, "token_attention": LAST_LAYER}).evidence
    assert torch.equal(probe["frame_feature"], mixed["frame_feature"])
    assert not torch.allclose(probe["token_attention"], mixed["token_attention"])
    patches = backbone.encode(frames, {"image_embedding": SINGLE_PATCHES})
    assert torch.equal(patches.tokens, family_of(source).load(BFLOAT16).encode(frames).tokens)
    assert len(patches.evidence["image_embedding"].flatten(0, 1).unique(dim=0)) == 3 * 196
    assert len(probe["token_attention"].unique()) > 0.9 * 3 * 196  # 16 bits would make ties of neighbours
    assert {value.dtype for value in (*probe.values(), *patches.evidence.values())} == {torch.float32}


def test_a_head_that_another_node_has_not_or_whose_config_does_not_fit_is_refused(source, siglip):
    resolved = family_of(source).with_pooling_head(siglip)
    with changed_json(siglip / "config.json") as config:
        config["vision_config"]["intermediate_size"] = 100
    with pytest.raises(ModelError, match=r"config\.json does not fit the pooling head"):
        with_head(source, siglip)
    with changed_tensors(siglip) as tensors:
        tensors["vision_model.head.probe"] = torch.zeros(1, 1, 64)
    with pytest.raises(ModelError, match="another pooling head on this node"):
        family_of(resolved).load(FLOAT32)


@pytest.mark.parametrize(("prefix", "others"), [("vision_model.", ("text_model.head.weight", "logit_scale")), ("", ())])
def test_every_layout_gives_the_same_head_and_identity(source, siglip, prefix, others):
    with changed_tensors(siglip) as tensors:
        for key in list(tensors):
            tensors[f"{prefix}{key.removeprefix('vision_model.')}"] = tensors.pop(key)
        tensors.update({key: torch.zeros(3) for key in others})
    assert head_of(source, siglip).identity == head_of(source, "tiny").identity
    with changed_tensors(siglip) as tensors:  # a head of another training
        next(tensor for name, tensor in tensors.items() if name.endswith("head.mlp.fc2.bias"))[-1] += 1e-3
    assert head_of(source, siglip).identity != head_of(source, "tiny").identity


def test_what_no_tensor_shows_is_part_of_the_identity(source, siglip):
    """Other numbers of heads give the same shapes and another attention; a default may be said or left out."""
    stock = SiglipVisionConfig()
    assert {name: getattr(stock, name) for name in DEFAULTS} == DEFAULTS
    config = json.loads((siglip / "config.json").read_text())

    def identity(**settings):
        vision = {k: v for k, v in (config["vision_config"] | settings).items() if v is not None}
        (siglip / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
        return head_of(source, siglip).identity

    usual = identity()
    assert identity(layer_norm_eps=1e-6) == identity(layer_norm_eps=None) == usual
    heads = config["vision_config"]["num_attention_heads"]
    assert len({usual, identity(num_attention_heads=2 * heads), identity(layer_norm_eps=1e-3)}) == 3


def test_only_the_head_is_read_and_only_where_it_is_asked_for(source, siglip, monkeypatch):
    with changed_tensors(siglip) as tensors:
        wanted = {name for name in tensors if name.startswith("vision_model.")}
        tensors["vision_model.encoder.big"] = torch.zeros(9, 9)
    read = count_reading(monkeypatch)
    resolved = family_of(source).with_pooling_head(siglip)
    assert set(read) == wanted
    assert family_of(resolved).load(FLOAT32).pooling_head is not None
    assert family_of(source).load(FLOAT32).pooling_head is None


def test_checkpoints_without_a_head_that_fits_are_refused(source, siglip):
    def refused(match):
        with pytest.raises(ModelError, match=match):
            family_of(source).with_pooling_head(siglip)

    with changed_tensors(siglip) as tensors:
        del tensors["vision_model.head.probe"]
    refused(r"has no head\.probe: name a SigLIP checkpoint with its pooling head")
    with changed_tensors(siglip) as tensors:
        tensors["vision_model.head.probe"] = torch.zeros(1, 1, 96)
    refused("96 channels wide, the vision tower 64: name the SigLIP checkpoint")
    (siglip / "config.json").write_text(json.dumps({"model_type": "clip"}))
    refused("not a SigLIP checkpoint .*'clip'.*google/siglip-so400m-patch14-384")
    shutil.rmtree(siglip)
    refused("is no folder on this machine")


def test_the_tiny_head_is_the_same_everywhere(source):
    assert tiny.compute_tiny_identity("tiny-siglip") == "tiny-siglip:2-187f7aaff2fc"
    assert head_of(source, "tiny").identity == "siglip-head:7b963bec5b8dd2c515fa759670345771"


TEXTS = ["What is ridden?", "WHO,  is: riding...", "A woman's red bike"]


@torch.no_grad()
def stock_features(folder, text):
    """[1,De] of the stock model and the stock call of its documentation."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer([text], padding="max_length", truncation=True, return_tensors="pt").input_ids
    return SiglipModel.from_pretrained(folder).eval().get_text_features(ids).pooler_output, ids


@pytest.fixture
def tower(source, siglip):
    return TextTower.load(family_of(source).text_tower(siglip), "cpu")


def test_a_text_is_what_the_stock_model_makes_of_it_and_one_without_a_word_is_refused(tower, siglip):
    for text in TEXTS:
        expected, ids = stock_features(siglip, text)
        assert torch.equal(tower.segments(text), ids) and ids[0, -1] == tower.tokenizer.eos_token_id
        torch.testing.assert_close(tower.embedding(text), expected, rtol=1e-5, atol=1e-5)
    others = torch.cat([tower.embedding(other) for other in TEXTS])
    assert torch.cosine_similarity(others[:1], others[1:]).max() < 0.999
    for text in ("", "  ", "?!"):
        with pytest.raises(ValueError, match="no word that SigLIP's tokenizer knows"):
            tower.embedding(text)


def test_a_long_text_is_cut_into_segments_that_each_have_their_end(tower, siglip):
    words = ["what", "is", "who", "a", "red", "bike", "ridden", "riding"] * 150
    text, end = " ".join(words), tower.tokenizer.eos_token_id
    embedded, segments = tower.embedding(text), tower.segments(text)
    assert embedded.shape == (len(segments), 64) and len(segments) > 64  # more than go through at once
    assert (segments[:, -1] == end).all()
    assert segments[segments != end].tolist() == tower.tokenizer(text, add_special_tokens=False).input_ids
    with torch.no_grad():
        expected = SiglipModel.from_pretrained(siglip).eval().get_text_features(segments).pooler_output
    torch.testing.assert_close(embedded, expected, rtol=1e-5, atol=1e-5)


def test_only_the_text_tower_is_read(source, siglip, monkeypatch):
    tower = family_of(source).text_tower(siglip)
    read = count_reading(monkeypatch)
    loaded = TextTower.load(tower, "cpu")
    assert set(read) == {name for name in load_file(siglip / "model.safetensors") if name.startswith("text_model.")}
    assert {tensor.dtype for tensor in loaded.model.parameters()} == {torch.float32}


def test_the_identity_covers_weights_config_and_tokenizer_and_another_node_must_have_it(source, siglip):
    def identity(place=siglip):
        return family_of(source).text_tower(place).identity

    resolved, usual = family_of(source).text_tower(siglip), identity("tiny")
    with changed_tensors(siglip) as tensors:
        tensors["vision_model.head.probe"] += 1
    assert identity() == resolved.identity == usual  # the head has an identity of its own
    with changed_tensors(siglip) as tensors:
        tensors["text_model.head.bias"] += 1e-3
    with pytest.raises(ModelError, match="another text tower on this node"):
        TextTower.load(resolved, "cpu")
    identities = {usual, identity()}
    with changed_json(siglip / "config.json") as config:
        config["text_config"]["layer_norm_eps"] = 1e-3
    identities.add(identity())
    text = (siglip / "tokenizer.json").read_text()
    (siglip / "tokenizer.json").write_text(text.replace('"Lowercase"', '"NFKC"'))
    assert len(identities | {identity()}) == 4
    with changed_tensors(siglip) as tensors:
        for name in [name for name in tensors if name.startswith("text_model.")]:
            del tensors[name]
    with pytest.raises(ModelError, match="no tensor of a text tower: name the whole SigLIP checkpoint"):
        family_of(source).text_tower(siglip)


@pytest.mark.parametrize(
    ("filename", "change", "words"),
    [
        ("config.json", {"text_config": {"intermediate_size": 100}}, r"config\.json does not fit the weights"),
        ("config.json", {"text_config": {"projection_size": 32}}, "text tower gives 32 values, its pooling head 64"),
        ("config.json", {"text_config": ...}, "vision half of a SigLIP checkpoint"),
        ("tokenizer_config.json", {"pad_token": None}, "names no eos_token or no pad_token"),
        ("tokenizer.json", {"model": None}, "no tokenizer that can be loaded"),
        ("tokenizer.json", None, r"has no file spiece\.model"),
    ],
)
def test_checkpoints_without_a_tower_that_fits_are_refused(source, siglip, filename, change, words):
    if change is None:
        (siglip / filename).unlink()
    else:
        content = merge(json.loads((siglip / filename).read_text()), change)
        (siglip / filename).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=words):
        TextTower.load(family_of(source).text_tower(siglip), "cpu")
