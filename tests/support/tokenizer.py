"""A tokenizer for the tiny models: forty words, and a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from support.models import EOS, MASK

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Word wN is token N; 36 and 37 are the template's marks."""
    words = {f"w{i}": i for i in range(36)} | {"<user>": 36, "<bot>": 37, "<eos>": EOS, "<mask>": MASK}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", mask_token="<mask>",
        additional_special_tokens=["<user>", "<bot>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
