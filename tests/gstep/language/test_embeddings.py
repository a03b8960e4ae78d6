"""Input embeddings without the model they are of."""

import pytest
import torch

from gstep.backbones import ModelSource
from gstep.language.weights import InputEmbeddings
from tests.gstep.llms import FAMILIES, llm


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_has_the_embedding_that_the_model_gives_it(name):
    table = InputEmbeddings(ModelSource.resolve(name), llm(name).tokenizer, torch.float32)
    for text in ("What?", "Qu'est-ce qui se passe? 什么"):
        assert torch.equal(table.mean(text), llm(name).embedding(text))
    with pytest.raises(ValueError, match="one character"):
        table.mean("")
