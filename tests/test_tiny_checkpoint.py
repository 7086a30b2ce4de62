"""The model in the box as a folder: its tokenizer, chat template and size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import dinfer
from dinfer.problems import generate

FOLDER = Path(dinfer.__file__).parent / "checkpoints" / "tiny"
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


def test_the_file_is_small_and_the_ids_agree() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 16_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["vocab_size"] == len(TOKENIZER)
    assert config["mask_token_id"] == TOKENIZER.mask_token_id
    assert config["eos_token_id"] == config["pad_token_id"] == TOKENIZER.eos_token_id == TOKENIZER.pad_token_id


def test_chat_template_gives_the_ids_of_training() -> None:
    user, assistant = TOKENIZER.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    for problem in generate("heldout", 40, seed=0):
        ids = TOKENIZER.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        assert ids == [user, *TOKENIZER.encode(problem.question, add_special_tokens=False), assistant]
        assert len(ids) <= 48 and len(TOKENIZER.encode(problem.solution)) < 96


def test_a_whole_conversation_ends_every_answer_with_eos() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert text == "<|user|>a<|assistant|>b<|endoftext|>"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(Exception, match="use user or assistant"):
        TOKENIZER.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_words_of_the_generator_are_one_token_and_digits_too() -> None:
    assert TOKENIZER.tokenize("1024") == list("1024")
    for word in ("Cleo", "candles", "multiply", "coins", "Together", "west"):
        assert len(TOKENIZER.tokenize(" " + word)) == 1 or len(TOKENIZER.tokenize(word)) == 1


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
