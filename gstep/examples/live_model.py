"""Prune the video of a question that a model of transformers answers, without a cache.

Run it with ``python gstep/examples/live_model.py``; it requires torchvision. The model is a small one of this package,
trained on made-up videos: replace it and its processor with yours.
"""

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import gstep
from gstep.backbones import ModelSource

FRAMES, SIZE = 16, 96
QUESTION = """What color is the square?
A. green
B. red
C. blue
D. white
Answer with the option's letter from the given choices directly."""

folder, _ = ModelSource.resolve("shapes").pretrained()  # or an id on the hub
processor = AutoProcessor.from_pretrained(folder)
model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

frames = torch.full((FRAMES, 3, SIZE, SIZE), 60, dtype=torch.uint8)
for t in range(FRAMES):  # a red square that moves to the right, on a dark ground
    frames[t, :, 30:54, 4 * t : 4 * t + 24] = torch.tensor([220, 30, 30], dtype=torch.uint8)[:, None, None]

messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
inputs = processor(text=[prompt], videos=[frames], do_sample_frames=False, return_tensors="pt")
length = inputs["input_ids"].shape[1]
options = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

stock = model.generate(**inputs, **options)
print(f"all tokens: {processor.decode(stock.sequences[0, length:])}, after a prompt of {length} tokens")
for method, retention_ratio in (("gstep", 0.25), ("gstep", 0.05), ("random", 0.05)):
    with gstep.pruning(model, method=method, retention_ratio=retention_ratio):
        pruned = model.generate(**inputs, **options)
    assert torch.equal(pruned.sequences[:, :length], inputs["input_ids"])  # still the whole prompt
    change = (pruned.logits[0] - stock.logits[0]).abs().max()
    text = processor.decode(pruned.sequences[0, length:])
    print(f"{retention_ratio:.0%} by {method}: {text}; logits change by at most {change:.1f}")
