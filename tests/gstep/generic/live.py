"""A live model of transformers beside the cached path of the same checkpoint, and what both answer."""

import dataclasses
import inspect
from typing import Any, NamedTuple

import torch

import gstep
from gstep.backbones import Backbone, SampledVideo
from gstep.generic.processor import make_metadata, run_processor
from gstep.language import Decoding, LanguageModel, Prompt, prompt_builder
from tests.gstep.llms import visual_of

H, W = 56, 84
QUESTION = "What moves?"
#: With deepstack and three axes; a newline behind the video; frames as images; bidirectional blocks; grids of one step.
QUICK = ("qwen3_vl", "llava_onevision", "internvl", "gemma4", "kimi_k25")


class Live(NamedTuple):
    """A whole model and its processor."""

    model: Any
    processor: Any


def make_video(n_frames: int = 8, fps: float = 2.0) -> tuple[torch.Tensor, SampledVideo]:
    """A square that moves over a still picture, [F,H,W,3] uint8."""
    still = torch.randint(0, 256, (H, W, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    frames = still.repeat(n_frames, 1, 1, 1)
    for i in range(n_frames):
        frames[i, 20:40, 5 * i : 5 * i + 20] = torch.tensor([250, 30 * i % 256, 40], dtype=torch.uint8)
    return frames, SampledVideo(H, W, [i / fps for i in range(n_frames)], None, fps, n_frames)


def render(processor: Any, *parts: dict[str, str]) -> str:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def keep_taken(case: Live, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs that the model has parameters for."""
    names = inspect.signature(case.model.forward).parameters
    return {key: value for key, value in inputs.items() if key in names}


def read(case: Live, n_frames: int = 8) -> dict[str, torch.Tensor]:
    """What the model takes of the processor's output for a video."""
    frames, video = make_video(n_frames)
    text = render(case.processor, {"type": "video"})
    inputs = run_processor(case.processor, text, frames.permute(0, 3, 1, 2), make_metadata(video))
    taken = {key: value for key, value in keep_taken(case, inputs).items() if isinstance(value, torch.Tensor)}
    # Its pixels do not say where a frame ends.
    is_minicpm = type(case.model).__name__.startswith("MiniCPM")
    return taken | ({"video_metadata": inputs["video_metadata"]} if is_minicpm else {})


def answer(case: Live, inputs: dict[str, Any], **options: Any) -> Any:
    fixed = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    return case.model.generate(**inputs, **(fixed | options))


def first_logits(case: Live, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    output = answer(case, inputs, output_logits=True, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
    return output.logits[0]


def prompt_of(backbone: Backbone) -> Prompt:
    """The prompt of the cached path: encoder, rounding, method and prompt, each by itself."""
    source = backbone.family.source
    frames, video = make_video()
    preprocessor = backbone.preprocessor
    size = preprocessor.target_size(len(frames), H, W)
    if source.family != "generic":
        frames = torch.as_tensor(preprocessor.resize(frames.numpy(), size))
        video = dataclasses.replace(video, height=size[0], width=size[1])
    visual = backbone.encode(frames, video=video)
    index = gstep.prune(visual.tokens.to(torch.bfloat16), retention_ratio=0.25).index
    newline = backbone.newline()
    newline = None if newline is None else newline.to(torch.bfloat16)
    kept = visual_of(visual, index, torch.bfloat16, newline, **backbone.model_extra(video))
    return prompt_builder(source).build(QUESTION, [kept])


def check_parity(case: Live, backbone: Backbone, model: LanguageModel) -> None:
    """Check that a live model answers as the two halves of its checkpoint do."""
    prompt = prompt_of(backbone)
    inputs = read(case)
    with gstep.pruning(case.model, retention_ratio=0.25):
        logits, ids = first_logits(case, inputs), answer(case, inputs)
    expected = model.logits([prompt], last=1)[0]  # a single row, also where a model ignores logits_to_keep
    assert logits.shape == expected.shape and float((logits - expected).abs().max()) <= 1e-5 * float(expected.std())
    tokens = model.generate([prompt], [Decoding(max_new_tokens=4)])[0].token_ids
    assert tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())[: len(tokens)] == tokens
    assert "generate" not in vars(case.model) and "prepare_inputs_for_generation" not in vars(case.model)
