"""Answer a question by an LLM of your own: cached tokens take the place of its vision encoder's output.

Run it by ``python pipeline/examples/own_llm.py CACHE VIDEO_ID``; the LLM is the one that the tokens were made for.
"""

import sys

import torch
from transformers import AutoModelForImageTextToText

from gstep.language import Batch, encoder_outputs, prompt_builder
from pipeline import TokenCache, model_source

cache = TokenCache(sys.argv[1])
source = model_source(cache)  # the checkpoint that the tokens were made for
folder, revision = source.pretrained()
model = AutoModelForImageTextToText.from_pretrained(folder, revision=revision)  # or your own, on its device
builder = prompt_builder(source)  # chat template, tokenizer and positions; no weights
visual = cache.get(sys.argv[2], retention_ratio=0.10).visual
batch = Batch.of([builder.build("What happens in this video?", [visual])])
with torch.inference_mode():
    ids = model.generate(
        input_ids=batch.input_ids.to(model.device),
        attention_mask=batch.mask.to(model.device),
        position_ids=batch.position_ids().to(model.device),
        mm_encoder_outputs=encoder_outputs([visual], model),
        max_new_tokens=32,
    )
print(builder.tokenizer.decode(ids[0, batch.input_ids.shape[1] :], skip_special_tokens=True))
