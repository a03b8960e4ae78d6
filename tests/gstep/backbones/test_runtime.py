"""Device, dtype and attention are chosen in one place; importing the package stays light."""

import pytest
import torch
import transformers
import transformers.modeling_utils

from gstep.backbones import Runtime, choose_runtime
from gstep.backbones.runtime import ATTENTION, FLASH
from gstep.errors import ModelError
from pipeline.options import ATTN
from tests.interpreter import run_python


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this a machine with CUDA and a form of FlashAttention, or without."""

    def become(*, cuda, flash=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        for form in (2, 3, 4):
            # As transformers' checks: cached, and called without arguments.
            there = lambda is_there=form == flash: is_there  # noqa: E731
            monkeypatch.setattr(transformers.utils.import_utils, f"is_flash_attn_{form}_available", there)
            if hasattr(transformers.utils, f"is_flash_attn_{form}_available"):
                monkeypatch.setattr(transformers.utils, f"is_flash_attn_{form}_available", there)

    return become


def test_auto_takes_cuda_and_flash_attention_where_they_can_run(machine):
    machine(cuda=False)
    assert choose_runtime() == Runtime("cpu", torch.float32, "sdpa")
    with pytest.raises(ModelError, match="no CUDA device"):
        choose_runtime("cuda")
    machine(cuda=True)
    assert choose_runtime() == Runtime("cuda", torch.bfloat16, "sdpa")
    machine(cuda=True, flash=2)
    assert choose_runtime().attn_implementation == "flash_attention_2"
    assert choose_runtime("cuda:1", "float16").attn_implementation == "flash_attention_2"
    assert choose_runtime(dtype="float32").attn_implementation == "sdpa"
    assert choose_runtime("cpu").attn_implementation == "sdpa"
    for form in (3, 4):  # which are taken where they are asked for alone
        machine(cuda=True, flash=form)
        assert choose_runtime().attn_implementation == "sdpa"
        assert choose_runtime(attn=f"flash_attention_{form}").attn_implementation == f"flash_attention_{form}"


@pytest.mark.parametrize(
    ("form", "remedy"),
    [(2, r"pip install .*\[flash-attn\]"), (3, "folder hopper"), (4, r"pip install .*\[flash-attn-4\]")],
)
def test_flash_attention_without_its_package_on_the_cpu_or_in_float32_is_refused(machine, form, remedy):
    machine(cuda=True)
    with pytest.raises(ModelError, match=remedy):
        choose_runtime("cuda", attn=f"flash_attention_{form}")
    machine(cuda=True, flash=form)
    for device, dtype in [("cpu", "bfloat16"), ("cuda", "float32")]:
        with pytest.raises(ModelError, match="cuda in bfloat16"):
            choose_runtime(device, dtype, f"flash_attention_{form}")


def test_transformers_knows_every_name_of_attention():
    """It takes a form of flash attention by this name, and looks for its package by a check of this one."""
    known = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.keys()
    assert {*ATTENTION} - {"eager"} <= {*known} and ("auto", *ATTENTION) == ATTN
    for name in FLASH:
        assert callable(getattr(transformers.utils.import_utils, f"is_flash_attn_{name[-1]}_available"))


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"dtype": "int8"}, {"attn": "magic"}])
def test_unknown_names_are_refused(wrong, machine):
    machine(cuda=False)
    with pytest.raises(ModelError, match="known: auto"):
        choose_runtime(**wrong)


def test_tables_need_no_torch_selections_no_triton_preprocessing_no_transformers_and_live_pruning_those_alone():
    code = """
import pickle, sys
sys.modules.update(dict.fromkeys(["torchvision", "ray", "pyarrow", "av", "decord", "num2words"]))
import gstep.methods, gstep.families
assert "torch" not in sys.modules
sys.modules["triton"] = None
import gstep.selection.gpu.launch
gstep.make_pruner("gstep")
import gstep.backbones
assert not {"transformers", "safetensors", "huggingface_hub"} & set(sys.modules)
from gstep.backbones import ModelSource, choose_runtime, family_of
source = ModelSource.resolve("tiny")
preprocessor = pickle.loads(pickle.dumps(family_of(source).preprocessor()))
assert family_of(source).static().newline.shape == (64,)
assert choose_runtime("cpu").attn_implementation == "sdpa"
assert "transformers" not in sys.modules
gstep.pruning
"""
    run_python("-c", code, check=True)
