"""Makes the tokenizer of the model in the box: `python tools/build_tokenizer.py dinfer/demo/checkpoints/tiny`.

It is a byte-level BPE, so that any text comes back exactly. It is trained on the generator's own text, so that its
words are one token each. Every digit is a token, so that the model computes numbers digit by digit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dinfer.demo.problems import stream

EOS, MASK, USER, ASSISTANT = "<|endoftext|>", "<|mdm_mask|>", "<|user|>", "<|assistant|>"

# An assistant's turn ends with EOS, as the training texts do. These have no system messages, so none is written: many
# clients always send one, and what the models were not trained on would only make answers worse. Nor are
# definitions of tools written, but calls and their results are: they are what was said.
CHAT_TEMPLATE = (
    "{% set unwritten = tools %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '" + USER + "' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + ASSISTANT + "' + message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ ('' if loop.first else '\n') + '<tool_call>\n{\"name\": ' + "
    "call['function']['name'] | tojson + ', \"arguments\": ' + call['function']['arguments'] | tojson + "
    "'}\n</tool_call>' }}{% endfor %}{{ '" + EOS + "' }}"
    "{% elif message['role'] == 'tool' %}{{ '"
    + USER
    + "<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% elif message['role'] == 'system' and not loop.last %}"
    "{% else %}{{ raise_exception('role ' + message['role'] + ' is not known to this model, or comes last: use user or "
    "assistant; a system message before them is left out') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def corpus(texts: int, seed: int) -> Iterator[str]:
    """Questions and solutions of the training split."""
    for _, problem in zip(range(texts), stream("train", seed), strict=False):
        yield problem.question
        yield problem.solution


def build(vocabulary: int, texts: int, seed: int) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` tokens. Raises ValueError if that is too few."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS, MASK, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(texts, seed), trainer)
    if tokenizer.get_vocab_size() > vocabulary:
        raise ValueError(f"--vocabulary {vocabulary}: too small for the 256 bytes and the special tokens")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes the files of `transformers.AutoTokenizer.from_pretrained(folder)`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=20_000, help="problems of the training split to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-length", type=int, default=256)
    arguments = parser.parse_args()
    save(build(arguments.vocabulary, arguments.texts, arguments.seed), arguments.folder, arguments.max_length)


if __name__ == "__main__":
    main()
