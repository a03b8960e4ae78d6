"""A model family of one's own, from gstep/examples/family and the line of the page of gstep."""

import json
import re
import shutil

import numpy as np
import torch
from safetensors.torch import save_file

from tests.builders.clips import sample
from tests.builders.runs import environment
from tests.interpreter import run_python
from tests.paths import ROOT, python_path

SECTION = (ROOT / "gstep/README.md").read_text().split("## Add a model family\n")[1].split("\n## ")[0]
EXAMPLE = ROOT / "gstep/examples/family"
SIDE, PATCH, HIDDEN = 32, 8, 6
USE = """
import sys
import torch
import pipeline
from gstep.backbones import ModelSource, choose_runtime, family_of

model, clip, out = sys.argv[1:]
video = pipeline.encode_video(clip, model=model, num_frames=4, retention_ratio=0.25)
family = family_of(ModelSource.resolve(model))
frames = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)
tokens = family.load(choose_runtime("cpu", "float32", "auto")).encode(frames).tokens
torch.save({"frames": frames, "tokens": tokens, "kept": video.kept().shape, "n": len(video.pruned.tokens)}, out)
assert family.token_bytes(4, 32, 32) == 2 * 4 * 16 * 6 and family.flops(1, 32, 32) == 2 * 16 * 192 * 6
from gstep.language import BUILDERS, PromptBuilder
assert issubclass(BUILDERS["patches"], PromptBuilder) and not BUILDERS["patches"].__abstractmethods__
"""


def test_two_files_and_a_line_make_a_family(tmp_path):
    """In a copy of the checkout; tokens are those of plain loops in numpy."""
    copy = tmp_path / "copy"
    for room in ("gstep", "pipeline"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(EXAMPLE / "backbone.py", copy / "gstep/backbones/patches.py")
    shutil.copy(EXAMPLE / "prompts.py", copy / "gstep/language/patches.py")
    (line,) = re.findall(r'`("patches": Family.*?,)`', SECTION, re.DOTALL)
    table = copy / "gstep/families.py"
    table.write_text(table.read_text().replace("] = {\n", f"] = {{\n    {line}\n", 1))
    model = tmp_path / "model"
    model.mkdir()
    matrix = torch.randn(HIDDEN, 3 * PATCH**2, generator=torch.Generator().manual_seed(0))
    save_file({"matrix": matrix}, model / "model.safetensors")
    config = {"model_type": "patches", "patch_size": PATCH, "hidden_size": HIDDEN}
    (model / "config.json").write_text(json.dumps(config))
    pixels = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (model / "preprocessor_config.json").write_text(json.dumps(pixels))
    script = tmp_path / "use.py"
    script.write_text(USE)  # a plain script: encode_video needs no main guard
    given = model, sample("bikes.mp4"), tmp_path / "made.pt"
    done = run_python(script, *given, cwd=copy, env=environment(PYTHONPATH=python_path(copy)))
    assert done.returncode == 0, done.stderr
    made = torch.load(tmp_path / "made.pt", weights_only=True)
    assert (tuple(made["kept"]), made["n"]) == ((4, 4, 4), 16)
    pixels = (made["frames"].double().numpy() / 255 - 0.5) / 0.5
    for t, row, column in np.ndindex(2, 4, 4):
        patch = pixels[t, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        wanted = matrix.double().numpy() @ patch.transpose(2, 0, 1).reshape(-1)
        assert np.allclose(made["tokens"][t, 4 * row + column].numpy(), wanted, atol=1e-4)
