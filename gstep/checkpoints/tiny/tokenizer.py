"""The tokenizers of the tiny models: a byte-level BPE trained when it is written, with a family's special tokens."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 512  # the special tokens, 256 bytes, and merges for the rest

# The training text decides only which words become one token.
_TEXT = """
What is happening in this video? Describe the video in detail. Who is in the video and what are they doing?
Answer the question with a single word or phrase. Answer with the letter of the correct option from the given choices.
Select the best answer to the following multiple choice question based on the video. The options are A, B, C, D.
The video shows a person who talks while looking at the camera, sitting in a car that moves along a street.
A large white rabbit comes out of its home under a tree, stretches, and looks at the green grass and the flowers.
Several people ride bikes through a city; a man and a woman stop near the corner and then turn to the right.
How many people are there? What colour is the car? Where does the scene take place? When does it begin, and why?
At the beginning of the video there are two birds; after that they fly away; in the end only the tree is left.
You are a helpful assistant. user system assistant true false yes no first second third before after during
"""


@dataclass(frozen=True)
class TinyTokenizer:
    """The description of one family's tokenizer.

    Attributes:
        special: the special tokens, the padding token first.
        chat_template: Jinja; None for a text tower, whose texts are normalized to lower case without punctuation and
            get an end token, as in SigLIP's tokenizer.json.
        end: the special token that ends an answer or a text.
        max_length: in tokens.
        roles: attribute name -> special token, for tokens that the stock processor reads from the tokenizer.
    """

    special: tuple[str, ...]
    chat_template: str | None
    end: str = "<|im_end|>"
    max_length: int = 32768
    roles: Mapping[str, str] = field(default_factory=dict)

    def find_token_id(self, token: str) -> int:
        """Return the id of a special token."""
        return self.special.index(token)


def write_trained_tokenizer(folder: Path, kind: TinyTokenizer) -> None:
    """Train the tokenizer and write the files that AutoTokenizer reads into an existing folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if kind.chat_template is None:
        tokenizer.normalizer = _make_normalizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in kind.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    if kind.chat_template is None:
        end = (kind.end, kind.find_token_id(kind.end))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {kind.end}", special_tokens=[end])
    _write_tokenizer_files(folder, tokenizer, kind)


def write_byte_tokenizer(folder: Path, kind: TinyTokenizer, ids: Mapping[str, int], vocab_size: int) -> None:
    """Write a tokenizer with a token for each byte, and a vocabulary of ``vocab_size``, into an existing folder.

    The special tokens have the given ids, bytes the first free ones in the order of their ByteLevel characters; bytes
    without room are left out. Other ids decode to "<id>".
    """
    tokens = {i: token for token, i in ids.items()}
    free = (i for i in range(vocab_size) if i not in tokens)
    tokens |= dict(zip(free, sorted(pre_tokenizers.ByteLevel.alphabet()), strict=False))
    tokens = {i: tokens.get(i, f"<{i}>") for i in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in tokens.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kind.special])
    _write_tokenizer_files(folder, tokenizer, kind)


def _write_tokenizer_files(folder: Path, tokenizer: Tokenizer, kind: TinyTokenizer) -> None:
    """Write tokenizer.json, tokenizer_config.json and, if there is a chat template, chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "additional_special_tokens": list(kind.special[1:]),
        "clean_up_tokenization_spaces": False,
        "eos_token": kind.end,
        "model_max_length": kind.max_length,
        "pad_token": kind.special[0],
        "padding_side": "right" if kind.chat_template is None else "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"extra_special_tokens": dict(kind.roles)} if kind.roles else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if kind.chat_template is not None:
        (folder / "chat_template.jinja").write_text(kind.chat_template, encoding="utf-8")


def _make_normalizer() -> normalizers.Normalizer:
    """Make a normalizer equal to canonicalize_text of transformers' SiglipTokenizer."""
    punctuation = "".join(f"\\{mark}" for mark in string.punctuation)
    return normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(f"[{punctuation}]"), ""),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(),
        ]
    )
