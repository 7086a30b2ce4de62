"""A message is text, even where it spells a special token; the template's own special tokens count."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.families import REAL
from support.tokenizer import published_tokenizer, save_tokenizer
from transformers import PreTrainedTokenizerFast

from dinfer.core.loading.files import ADAPTER, locate
from dinfer.core.pipeline.tokenizer import ChatTemplate, read_tokenizer
from dinfer.structure.tools import calls_in

NAMES = sorted(path.parent.name for path in REAL.glob("*/tokenizer_config.json"))


def read(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp(request.param)
    for file in (REAL / request.param).glob("*token*.json"):
        shutil.copy(file, folder)
    published_tokenizer(folder)
    return read(folder)


def special(tokenizer: Any, ids: list[int]) -> list[int]:
    return [token for token in ids if (added := tokenizer.added_tokens_decoder.get(token)) and added.special]


def conversation(text: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": text},
        {"role": "assistant", "content": "yes"}, {"role": "user", "content": text},
    ]  # fmt: skip


def test_ordinary_messages_are_what_the_template_makes_of_them(tokenizer: Any) -> None:
    messages = conversation("what is 1 < 2 | 3?\n\n\ue000")
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ChatTemplate(tokenizer).encode(messages) == want


def test_a_role_of_one_s_own_is_shown_or_refused(tokenizer: Any) -> None:
    chat, plain = ChatTemplate(tokenizer), [{"role": "user", "content": "what?"}]
    asked = [*plain, {"role": "critic", "content": "that is wrong"}, *plain]
    if "message['role'] +" in str(tokenizer.chat_template):  # LLaDA's takes any
        shown = tokenizer.decode(chat.encode(asked))
        assert "critic" in shown and "that is wrong" in shown
    else:
        with pytest.raises(ValueError, match="leaves out messages of role 'critic'"):
            chat.encode(asked)
    own = next(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    for role in (own, f"a{own}b", own[1:-1]):
        with pytest.raises(ValueError, match="is a part of a special token"):
            chat.encode([*plain, {"role": role, "content": "x"}])


def test_half_of_a_surrogate_pair_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        ChatTemplate(tokenizer).encode([{"role": "user", "content": "a \ud800"}])


def test_a_special_token_in_a_message_is_text(tokenizer: Any) -> None:
    """Any of them, several at once, alone, at the borders, and beside characters that the method uses itself."""
    chat = ChatTemplate(tokenizer)
    own = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    plain = special(tokenizer, chat.encode(conversation("x")))
    assert plain
    beside, nested = f"\ue000{own[-1]}\ue001", f"<{own[0][:-1]}{own[0]}"
    for text in ("".join(own), f" {own[0]} and {own[1]}\n", *own[:5], beside, nested):
        messages = conversation(text)
        ids = chat.encode(messages)
        assert special(tokenizer, ids) == plain
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_a_special_token_in_a_tool_is_text_and_tools_without_a_place_are_refused(tokenizer: Any) -> None:
    chat = ChatTemplate(tokenizer)
    own = next(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)

    def told(word: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        schema = {"type": "object", "properties": {word: {"type": "string"}, "role": {"description": word}}}
        call = {"type": "function", "function": {"name": "f", "arguments": {word: word}}}
        talk = [*conversation("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        return [*talk, {"role": "tool", "content": word}], tools

    if not chat.takes_tools:
        for messages, tools in ((told("x")[0], None), (conversation("x"), told("x")[1])):
            with pytest.raises(ValueError, match="shows its model no tools"):
                chat.encode(messages, tools)
        return
    plain, ids = (chat.encode(*told(word)) for word in ("x", own))
    assert special(tokenizer, ids) == special(tokenizer, plain)
    messages, tools = told(own)
    rendered = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


def test_what_the_template_does_to_a_message_it_still_does(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = read(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}<user>{{ (m.content | trim).split('w9')[0] | upper }}{% endfor %}"
    ids = ChatTemplate(tokenizer).encode([{"role": "user", "content": "  <bot> W3 w9 <mask> "}])
    assert tokenizer.decode(ids)[:6] == "<user>" and len(special(tokenizer, ids)) == 1


def test_words_of_the_vocabulary_that_are_special_tokens_are_read_in_parts(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = read(tmp_path)
    chat = ChatTemplate(tokenizer)
    assert chat.encode([{"role": "user", "content": "w3"}]) == [36, 3, 37]
    ids = chat.encode([{"role": "user", "content": "w3 <bot> w4"}])
    assert ids[:2] == [36, 3] and ids[-2:] == [4, 37] and special(tokenizer, ids) == [36, 37]


def test_other_fields_of_a_message_are_text_too(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = read(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.calls[0].name }} {{ m.content }}{% endfor %}"
    ids = ChatTemplate(tokenizer).encode([{"role": "user", "content": "w1", "calls": [{"name": "<bot>"}]}])
    assert special(tokenizer, ids) == [36]


SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""  # as the GGUF file of smol's base has it


@pytest.fixture
def smol(tmp_path: Path) -> ChatTemplate:
    """smol's template, with the tokenizer of the tests."""
    save_tokenizer(tmp_path)
    found = read_tokenizer(tmp_path, None, "smol")
    assert found is not None
    return ChatTemplate(found)


def test_an_adapter_s_template_stands_in_place_of_the_checkpoint_s(tmp_path: Path, smol: ChatTemplate) -> None:
    assert smol.tokenizer.chat_template == (locate("smol", needed=ADAPTER) / "chat_template.jinja").read_text()
    own = read_tokenizer(tmp_path, None, "tiny-d2f")  # which has none
    assert own is not None and own.chat_template == read(tmp_path).chat_template


def test_smol_without_tools_reads_what_its_parent_reads(smol: ChatTemplate) -> None:
    parent = copy.copy(smol.tokenizer)
    parent.chat_template = SMOLLM2
    for messages in (conversation("a"), conversation("a")[1:], [{"role": "critic", "content": " x\n"}]):
        for ends in (True, False):
            want = ChatTemplate(parent).write(messages, add_generation_prompt=ends)
            assert smol.write(messages, add_generation_prompt=ends) == want


@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_smol_is_shown_tools_and_calls_as_it_must_write_them(smol: ChatTemplate, arguments: Any) -> None:
    offered = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}] * 2
    asked, called = {"role": "user", "content": "warm?"}, {"role": "assistant", "content": "", "tool_calls": calls}
    shown = smol.write([asked, called, *[{"role": "tool", "content": text} for text in ("18", "12")]], offered)
    system, user, written, results, rest = shown.split("<|im_end|>\n")
    assert "named SmolLM" in system and f"<tools>{json.dumps(offered)}</tools>" in system
    text, found = calls_in(written.removeprefix("<|im_start|>assistant\n"))
    assert (
        text == ""
        and [(call.name, json.loads(call.arguments)) for call in found] == [("weather", {"city": "Zürich"})] * 2
    )
    assert results.count("<|im_start|>user") == 1 and results.index("18") < results.index("12")
    assert user.endswith("warm?") and rest == "<|im_start|>assistant\n"
    told = smol.write([{"role": "system", "content": "be brief"}, asked], offered)
    assert told.startswith("<|im_start|>system\nbe brief\n\n") and told.count("be brief") == told.count("system") == 1
