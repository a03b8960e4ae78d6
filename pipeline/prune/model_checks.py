"""What a dry run checks about the model: each result says how something was checked, or that it was not checked."""

from __future__ import annotations

from gstep.backbones import BACKBONES, ModelFamily, ModelSource, family_of, find_family
from gstep.checkpoints.tensors import iter_quantizations, read_tensor_types
from gstep.errors import ModelError
from gstep.families import FAMILIES, GENERIC, describe_family
from gstep.language import BUILDERS, prompt_builder
from gstep.serving import find_vllm_version
from pipeline.errors import make_printable
from pipeline.prune.recipe import Recipe
from pipeline.video.sampling import Sampling

_TOKENIZERS = ("tokenizer.json", "vocab.json")


def check_model(recipe: Recipe) -> dict[str, str]:
    """Check the model as far as possible without weights.

    Returns:
        What was found, or that it was not checked, for each of: "model", "vision part" (tensors of the checkpoint),
        "sizes", "transformers" and "vLLM" (does the installed version have the model), and "to stock" (a reduced model
        against the stock class).

    Raises:
        ModelError: the checkpoint lacks tensors of the vision part, has them quantized, or a weight file is damaged.
    """
    source = recipe.source
    return {
        "model": f"{describe_family(source.family, source.model_type)}, {source.identity}",
        "vision part": _check_vision_part(source),
        "sizes": _describe_sizes(source),
        "transformers": _check_transformers(source),
        "vLLM": _check_vllm(source),
        "to stock": _compare_to_stock(source, recipe.sampling),
    }


def _check_vision_part(source: ModelSource) -> str:
    """Check that the checkpoint has the tensors of the vision part, and describe how that was checked, or why not.

    Raises:
        ModelError: tensors are missing or quantized, or a weight file is damaged.
    """
    family = family_of(source)
    if family.check_tensors():
        if source.family == GENERIC:
            return "checked: the checkpoint has all its tensors, by names and shapes; no weight was read"
        is_own_check = type(family).check_tensors is not ModelFamily.check_tensors  # of a user family
        if source.family in FAMILIES or not is_own_check:
            return "checked: the checkpoint has all its tensors, by their names; no weight was read"
        return f"checked by check_tensors of {source.family}, which raised nothing"
    if source.family == GENERIC or not read_tensor_types(source):
        return "not checked: the names of its tensors are not on this machine"
    return f"not checked: {source.family} has no empty_tower to compare the checkpoint's tensors with"


def _describe_sizes(source: ModelSource) -> str:
    """Describe how the numbers of tokens and bytes are computed, by the kind of family."""
    if source.family in BACKBONES:
        return "computed from config.json and the preprocessor's settings"
    if source.family == GENERIC:
        return "counted by running the checkpoint's own processor on blank frames"
    return f"not checked: computed by token_counts and token_bytes of {source.family}"


def _check_transformers(source: ModelSource) -> str:
    """Describe whether transformers can answer questions with this model, as far as that is known without weights.

    It cannot if the family has no class of prompts, the language model is quantized, or the prompts raise an error,
    which becomes part of the description. Nothing is checked if the tokenizer of a Hugging Face model is not on this
    machine. For the generic family, the result of its gate is described.
    """
    if source.family == GENERIC:
        return _describe_gate(source)
    if find_family(source.family).prompts is None:
        return f"answers no questions: {source.family} names no class of prompts"
    if any(True for _ in iter_quantizations(source.config)):
        return "answers no questions: the language model is quantized"
    if source.files.kind == "hub" and not any(map(source.files.find_local, _TOKENIZERS)):
        return "not checked: the tokenizer is not on this machine"
    try:
        prompt_builder(source)
    except ModelError as error:
        return f"answers no questions: {make_printable(str(error))}"
    except Exception as error:  # noqa: BLE001 - a user family may raise anything
        return f"answers no questions: its class of prompts raises {type(error).__name__}: {make_printable(str(error))}"
    return "checked: tokenizer, chat template and config make prompts; the language model was not checked"


def _describe_gate(source: ModelSource) -> str:
    """Describe the result of the check that a model of the generic family has passed (``gstep.generic.gate``)."""
    parity = (source.layout or {}).get("parity", {})
    of_what = f"with the weights {weights}" if (weights := parity.get("weights")) else "reduced, with random weights"
    measured = f"largest difference {parity['difference']:.2g}, spread {parity['scale']:.2g}"
    return (
        f"checked: {parity['class']} of transformers {parity['transformers']} ({of_what}) gives from cached tokens "
        f"what it gives from the video ({measured})"
    )


def _check_vllm(source: ModelSource) -> str:
    """Describe whether a vLLM class takes cached tokens of this family, and vLLM is installed. Starts no vLLM."""
    if source.family not in BUILDERS:
        return f"answers no questions: no class of vLLM takes cached tokens of the family {source.family}"
    installed = find_vllm_version()
    if installed is None:
        return f"not checked: a class takes cached tokens of {source.family}, but vLLM is not installed here"
    return f"not checked: a class takes cached tokens of {source.family}; vLLM {installed} was not started"


def _compare_to_stock(source: ModelSource, sampling: Sampling) -> str:
    """Describe how the frame rate compares with the stock processor's; pixels and tokens are not compared."""
    if source.family == GENERIC:
        pixels = "pixels and tokens are made by the checkpoint's own processor and encoder"
        settings = source.preprocessor.get("video_preprocessor_config.json", {})
    else:
        pixels = "not checked: nothing compared pixels and tokens with those of transformers"
        settings = source.preprocessor
    stock_fps = settings.get("fps") or family_of(source).stock_fps
    if stock_fps is None:
        return f"{pixels}; its files state no rate of frames"
    if stock_fps == sampling.fps:
        return f"{pixels}; frames are at the rate of the stock processor"
    return f"{pixels}; the stock processor samples {stock_fps:g} frames a second (--fps {stock_fps:g})"
