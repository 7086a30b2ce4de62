"""The models in the box as folders: their tokenizer, chat template and size; and the second one at work."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import dinfer
from dinfer.core.loading.files import CheckpointError, boxed
from dinfer.demo.problems import generate, is_correct
from dinfer.formats.lora import CONFIG as ADAPTER
from tools.json_tiny import SCHEMA
from tools.trained_experts import trainable

BOX = Path(dinfer.__file__).parent / "demo" / "checkpoints"
TOKENIZER = AutoTokenizer.from_pretrained(BOX / "tiny")


def test_these_are_in_the_box() -> None:
    assert boxed() == ["tiny", "tiny-llada2"]
    tiny = ["tiny-d2f", "tiny-json", "tiny-llada2-insert-delete", "tiny-llada2-multi-block"]
    assert boxed(ADAPTER) == ["smol", "smol-drafts", *tiny]
    with pytest.raises(CheckpointError, match="'tiny-d2f' is an adapter, not a checkpoint: load the model"):
        dinfer.load({"name": "llada", "checkpoint": "tiny-d2f"})
    sizes = {name: (BOX / name / "adapter_model.safetensors").stat().st_size for name in boxed(ADAPTER)}
    assert sizes.pop("smol") + sizes.pop("smol-drafts") < 25_000_000 and max(sizes.values()) < 2_000_000


@pytest.mark.parametrize("name", boxed())
def test_the_file_is_small_and_the_ids_agree(name: str) -> None:
    assert (BOX / name / "model.safetensors").stat().st_size <= 16_000_000
    config = json.loads((BOX / name / "config.json").read_text())
    assert config["vocab_size"] == len(TOKENIZER)
    assert config["mask_token_id"] == TOKENIZER.mask_token_id
    assert config["eos_token_id"] == config["pad_token_id"] == TOKENIZER.eos_token_id == TOKENIZER.pad_token_id


@pytest.mark.parametrize("name", boxed())
def test_the_tokenizer_is_the_same(name: str) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (BOX / name / file).read_bytes() == (BOX / "tiny" / file).read_bytes()


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
        TOKENIZER.apply_chat_template([{"role": "oracle", "content": "x"}], tokenize=False)


def test_a_system_message_is_left_out() -> None:
    """Many clients always send one. The models were trained without, so the prompt, and the answer, is the same."""
    asked = [{"role": "user", "content": "a"}]
    prompts = [
        TOKENIZER.apply_chat_template([*system, *asked], tokenize=False, add_generation_prompt=True)
        for system in ([], [{"role": "system", "content": "You are a helpful assistant."}])
    ]
    assert prompts == ["<|user|>a<|assistant|>"] * 2
    with pytest.raises(Exception, match="comes last"):
        TOKENIZER.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


def test_words_of_the_generator_are_one_token_and_digits_too() -> None:
    assert TOKENIZER.tokenize("1024") == list("1024")
    for word in ("Cleo", "candles", "multiply", "coins", "Together", "west"):
        assert len(TOKENIZER.tokenize(" " + word)) == 1 or len(TOKENIZER.tokenize(word)) == 1


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.fixture(scope="module")
def second() -> dinfer.Pipeline:
    return dinfer.load("tiny-llada2", device="cpu", decoder="threshold")


def with_recipe(pipe: dinfer.Pipeline, **parts: Any) -> dinfer.Pipeline:
    ours = {"iteration": "block_diffusion", "cache": "block", "decoder": "threshold"}
    recipe = dinfer.compose(pipe.model, **(ours | parts))
    return dinfer.Pipeline(recipe, pipe.tokenizer, pipe.engine.runtime)


def test_the_block_cache_is_exact_on_it(second: dinfer.Pipeline) -> None:
    questions = [problem.question for problem in generate("heldout", 3, seed=0)]
    kept = second.generate(questions, max_new_tokens=96)
    assert [r.ids for r in kept] == [
        r.ids for r in with_recipe(second, cache="none").generate(questions, max_new_tokens=96)
    ]


@pytest.mark.rest
def test_editing_pays_on_it(second: dinfer.Pipeline) -> None:
    """It repairs what parallel decoding breaks; the first model in the box loses by the same decoder."""
    problems = generate("heldout", 16, seed=0)
    right, tokens, forwards = {}, 0, 0
    for edit_threshold in (0.0, 1.0):
        decoder = {"name": "joint_threshold", "threshold": 0.5, "edit_threshold": edit_threshold}
        results = with_recipe(second, decoder=decoder).generate(
            [problem.question for problem in problems], max_new_tokens=96
        )
        right[edit_threshold] = sum(is_correct(p, r.text) for p, r in zip(problems, results, strict=True))
        if edit_threshold == 0.0:
            tokens, forwards = (sum(getattr(r.counts, name) for r in results) for name in ("tokens", "forwards"))
    assert right[0.0] >= 13 and right[0.0] - right[1.0] >= 5, right
    assert tokens / forwards >= 4


def test_its_mixtures_use_all_their_experts(second: dinfer.Pipeline) -> None:
    """None is dead: the least used gets a twentieth of an even share or more."""
    network = trainable(copy.deepcopy(second.model))
    with torch.inference_mode():
        for problem in generate("heldout", 16, seed=0):
            network.score([second.encode(problem.question) + TOKENIZER.encode(problem.solution)], "block_causal", 32)
    loads = [block.mlp.load_X / block.mlp.load_X.mean() for block in network.blocks[1:]]
    assert min(load_X.min() for load_X in loads) > 0.05


@pytest.mark.rest(but=1)
@pytest.mark.parametrize(
    ("preset", "least"), [("tiny-d2f", 9.0), ("tiny-llada2-multi-block", 9.0), ("tiny-llada2-insert-delete", 4.0)]
)
def test_an_adapter_in_the_box_does_what_it_was_trained_for(preset: str, least: float) -> None:
    """As its preset says: most answers right, at more tokens a forward than the model has without it."""
    pipe = dinfer.load(preset, device="cpu")
    problems = generate("heldout", 16, seed=0)
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=96)
    assert sum(is_correct(problem, result.text) for problem, result in zip(problems, results, strict=True)) >= 13
    counts = [result.counts for result in results]
    assert sum(one.tokens for one in counts) / sum(one.forwards for one in counts) > least


def test_the_adapter_for_json_answers_in_its_form() -> None:
    """Right, and in half the forwards of free text."""
    pipe, problems = dinfer.load("tiny-json", device="cpu"), generate("heldout", 16, seed=0)
    results = pipe.generate([problem.question for problem in problems], max_new_tokens=128, schema=SCHEMA)
    answers = [str(result.value["answer"]) for result in results]
    assert sum(problem.answer == answer for problem, answer in zip(problems, answers, strict=True)) >= 15
    assert sum(result.counts.tokens / result.counts.forwards for result in results) / len(results) > 5
