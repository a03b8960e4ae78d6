"""The check of a generic model: what it refuses, what it notices, and what it keeps on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.generic import gate, processor, reduced
from gstep.generic.layout import Layout
from tests.gstep.reading import changed_json, changed_tensors


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """The folder of kept results, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gstep-cache" / "checks"


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Path:
    """A tiny Qwen3-VL, to be changed."""
    return Path(shutil.copytree(tiny_checkpoint("qwen3_vl"), tmp_path / "model"))


def resolve(folder, **options) -> ModelSource:
    return ModelSource.resolve(folder, family="generic", **options)


def test_what_the_check_found_says_how_it_was_shown(folder):
    layout = Layout.of(resolve(folder))
    assert (layout.hidden_size, layout.deepstack_levels, layout.frames_per_step, layout.tail) == (64, 2, 2, 0)
    assert layout.in_pieces and layout.in_batches and layout.modality == "video" and not layout.stacked
    parity = layout.parity
    assert parity["class"] == "Qwen3VLForConditionalGeneration" and parity["transformers"] == transformers.__version__
    assert parity["difference"] == 0 < parity["scale"] and parity["names"] is True
    assert {name: value > 0.5 for name, value in parity["notices"].items()} == {
        "swapped token": True, "shifted position": True, "zeroed weight": True}  # fmt: skip


def test_a_result_is_kept_for_a_class_config_and_version(folder, kept, monkeypatch, capsys):
    first = resolve(folder).layout
    assert "once for this kind of model" in capsys.readouterr().err
    monkeypatch.setattr(gate, "compare", None)  # calling it would fail
    assert resolve(folder).layout == first and capsys.readouterr().err == ""
    # Other weights of the same config: only their names are checked.
    with changed_tensors(folder) as tensors:
        for tensor in tensors.values():
            tensor.mul_(1.5)
    assert resolve(folder).layout == first
    (file,) = kept.iterdir()
    assert len(json.loads(file.read_text())["identities"]) == 2
    monkeypatch.setattr(gate, "version", lambda package: "5.99.0")
    with pytest.raises(ModelError, match=r"check of the generic family fails .*TypeError: .*not callable"):
        resolve(folder)


def test_a_damaged_result_is_not_used(folder, kept):
    expected = resolve(folder).layout
    (file,) = kept.iterdir()
    for content in ("{", '{"layout": {"hidden_size": 64}, "identities": []}'):
        file.write_text(content)
        assert resolve(folder).layout.keys() == expected.keys() and json.loads(file.read_text())["identities"]


def test_a_folder_that_cannot_be_written_costs_only_the_next_run_its_time(folder, kept, capsys):
    kept.parent.mkdir(parents=True)
    kept.write_text("a file")
    assert resolve(folder).layout is not None and "was not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("visual.blocks.1.mlp.linear_fc1.weight", "missing"),
        ("visual.deepstack_merger_list.0.linear_fc2.weight", "renamed"),
        ("language_model.layers.1.mlp.up_proj.weight", "reshaped"),
    ],
)
def test_a_tensor_that_one_half_lacks_is_named_before_any_work(folder, part, kind):
    with changed_tensors(folder) as tensors:
        (name,) = (name for name in tensors if name.endswith(part))
        tensor = tensors.pop(name)
        if kind != "missing":
            tensors[f"{name}s" if kind == "renamed" else name] = tensor if kind == "renamed" else tensor[:-1]
    with pytest.raises(ModelError, match="has no weights of the right shape for .*" + part.rsplit(".", 2)[-2]):
        resolve(folder)


WRAP = gate.wrap_features


def drop_last_level(levels, layout):
    """Wrap features with a deepstack level of zeros."""
    *others, last = levels
    return WRAP([*others, [torch.zeros_like(rows) for rows in last]], layout)


def swap_rows(levels, layout):
    """Wrap features with two rows of the tokens swapped."""
    tokens, *others = levels
    return WRAP([[torch.cat([rows[1:2], rows[:1], rows[2:]]) for rows in tokens], *others], layout)


def scale_rows(levels, layout):
    """Wrap features 5 % too large."""
    return WRAP([[rows * 1.05 for rows in level] for level in levels], layout)


def shift_positions(model, inputs, keep, _):
    """Compute the positions of tokens, one too large from the video on."""
    return POSITIONS(model, inputs, keep, "original") + (torch.arange(len(keep)) > 20)


def change_times(output):
    """Record another frame rate than the video has."""
    return processor.encode_record({**output, "video_metadata": [replace(output["video_metadata"][0], fps=1.0)]})


def fill_with_zeros(model):
    for weight in model.parameters():
        weight.data.zero_()


def silence_language_model(model):
    FILL(model)
    fill_with_zeros(model.get_decoder().layers)


POSITIONS, FILL = gate.compute_prompt_positions, reduced._fill_weights
ANOTHER = r"from cached tokens, all kept, Qwen3VLForConditionalGeneration .* another"


@pytest.mark.parametrize(
    ("module", "step", "wrong", "words"),
    [
        *((gate, "wrap_features", wrap, ANOTHER) for wrap in (swap_rows, drop_last_level, scale_rows)),
        (gate, "compute_prompt_positions", shift_positions, "another result than from the video"),
        (gate, "encode_record", change_times, "makes other input_ids of its record than of the video"),
        (gate, "count_steps", lambda *_: 8, "of 8 frames 2 are encoded together, which makes 4 steps of time"),
        (reduced, "_fill_weights", fill_with_zeros, "do not depend on the frames"),  # it would notice nothing
        (reduced, "_fill_weights", silence_language_model, r"blind, since a zeroed weight .*jobs.doctor --model"),
        (reduced, "_reduce_config", lambda *_, **__: 1 / 0, "cannot be reduced .*ZeroDivisionError.*doctor --model"),
        (reduced, "get_free_memory_bytes", lambda: 2**16, "run the check on a machine with more"),
    ],
)
def test_a_model_that_the_check_finds_wrong_or_cannot_check_is_refused(
    folder, monkeypatch, kept, module, step, wrong, words
):
    monkeypatch.setattr(module, step, wrong)
    with pytest.raises(ModelError, match=words):
        resolve(folder)
    assert not kept.exists()


@pytest.mark.parametrize("name", ["Qwen3VLModel", "Qwen3VLTextModel", "BertModel"])
def test_a_class_that_writes_no_text_about_videos_is_one_clear_error(folder, name):
    with changed_json(folder / "config.json") as config:
        config["architectures"] = [name]
    with pytest.raises(ModelError, match=r"family fails|sees no videos|cannot import|no features"):
        resolve(folder)


def test_a_batch_that_mixes_up_its_videos_is_noticed(folder, monkeypatch):
    monkeypatch.setattr(gate, "wrap_features", lambda levels, layout: WRAP([[v[0]] * len(v) for v in levels], layout))
    assert not Layout.of(resolve(folder)).in_batches


def test_processor_files_that_are_changed_in_place_are_read_again(tiny_checkpoint, tmp_path):
    folder = Path(shutil.copytree(tiny_checkpoint("llava_onevision"), tmp_path / "llava"))
    assert processor.load_processor(resolve(folder, gate=False)).video_processor.size["height"] == 56
    path = folder / "processor_config.json"
    path.write_text(path.read_text().replace("56", "28"))
    assert processor.load_processor(resolve(folder, gate=False)).video_processor.size["height"] == 28


def test_a_user_without_a_home_folder_can_check_a_model(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(gate.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(gate.Path, "home", Mock(side_effect=RuntimeError("no home")))
    resolve(folder)
    assert len([*(tmp_path / "gstep-cache" / "checks").iterdir()]) == 1


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4", "lfm3_vl"])
def test_a_deep_config_is_reduced_to_all_kinds_of_its_layers(name, tiny_checkpoint):
    _, config = resolve(tiny_checkpoint(name), gate=False).find_stock_class()
    content = config.to_dict()
    text, vision = content["text_config"], content["vision_config"]
    for part, depth in ((text, 40), (vision, 30)):
        for key, value in part.items():
            if isinstance(value, list) and len(value) == part.get("num_hidden_layers", part.get("depth")):
                part[key] = (value * depth)[:depth]
        part["num_hidden_layers" if "num_hidden_layers" in part else "depth"] = depth
    config = reduced._reduce_config(type(config).from_dict(content), reduce_vision=True)
    n_text = config.text_config.num_hidden_layers
    assert 2 <= n_text <= 8
    assert getattr(config.vision_config, "depth", getattr(config.vision_config, "num_hidden_layers", 0)) <= 6
    if kinds := getattr(config.text_config, "layer_types", None):
        assert len(kinds) == n_text and {*kinds} == {*text["layer_types"]}
    assert config.text_config.hidden_size == text["hidden_size"]


def test_the_doctor_compares_the_real_weights(folder, monkeypatch):
    source = resolve(folder, gate=False)
    assert gate.check_weights(source)[0] == "ok"
    monkeypatch.setattr(gate, "wrap_features", scale_rows)
    state, says, _ = gate.check_weights(source)
    assert state == "wrong" and "another result" in says
    monkeypatch.setattr(gate, "get_free_memory_bytes", lambda: 1000)
    state, says, remedy = gate.check_weights(source)
    assert state == "unknown" and "nothing was compared" in says and "enough memory" in remedy


def test_the_doctor_compares_no_weights_of_which_a_file_is_not_on_this_machine(folder):
    names, tensors = ("a.safetensors", "b.safetensors"), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(names):
        save_file({key: tensors[key] for key in sorted(tensors)[number::2]}, folder / name, {"format": "pt"})
    source = resolve(folder, gate=False)
    assert source.weight_files == names
    (folder / "b.safetensors").unlink()
    state, says, _ = gate.check_weights(source)
    assert state == "unknown" and "1 of 2 weight files are on this machine" in says


def test_a_model_that_cannot_be_reduced_passes_once_the_doctor_has_compared_it(folder, monkeypatch):
    monkeypatch.setattr(reduced, "_reduce_config", lambda *_, **__: 1 / 0)
    with pytest.raises(ModelError, match="cannot be reduced"):
        resolve(folder)
    assert gate.check_weights(resolve(folder, gate=False))[0] == "ok"
    assert Layout.of(resolve(folder)).parity["weights"] == resolve(folder).identity
