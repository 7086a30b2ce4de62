"""The tokenizer of a checkpoint, the token ids of a conversation, and an answer as text that grows.

Text in a message stays text, even where it spells a special token.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dinfer.core.engine.request import Completion, Update
from dinfer.core.loading.checkpoint import small_files
from dinfer.core.loading.files import ADAPTER, SmallFiles, locate, small_object
from dinfer.core.pipeline.inputs import NoTools, encodable, texts_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {"system", "user", "assistant", "tool"}
PRIVATE = range(0xE000, 0xF900)  # characters that mean nothing in Unicode, and are neither spaces nor letters
# Of `apply_chat_template`: what a template is given from elsewhere, and its own arguments.
OWNED = {
    "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "chat_template", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "padding", "truncation", "max_length", "bos_token", "eos_token",
}  # fmt: skip
Decode = Callable[[list[int]], str]
WINDOW = 16  # tokens that are decoded again with those that follow


def read_tokenizer(folder: Path, name: str | None, adapter: str | None = None) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, with the adapter's chat template, if any. `name`: its class in transformers."""
    if (found := _read_tokenizer(folder, name)) is not None:
        if adapter and (own := locate(adapter, needed=ADAPTER) / "chat_template.jinja").is_file():
            found.chat_template = own.read_text(encoding="utf-8")
        # Too long a text is an error of ours, which says what fits. transformers would warn beside it.
        found.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return found


def _read_tokenizer(folder: Path, name: str | None) -> PreTrainedTokenizerBase | None:
    if folder.is_file():
        return _from_metadata(small_files(folder))
    if (folder / "tokenizer.json").is_file():
        # Complete in itself. AutoTokenizer would look into config.json too, and warn of model types it does not know.
        from transformers import PreTrainedTokenizerFast  # slow to import, and not needed for token ids

        try:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # the tokenizers package raises bare ones
            for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                small_object(folder, name)  # says it if this is not even JSON
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    if not (folder / "tokenizer_config.json").is_file():
        return None
    import transformers

    if name is not None and (folder / "vocab.json").is_file():
        return getattr(transformers, name).from_pretrained(folder)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer in {folder} cannot be read: {error}\nCode that comes with a checkpoint is never run. If "
            "its tokenizer is such code, put a tokenizer.json into the folder."
        ) from error


def _from_metadata(files: SmallFiles) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a GGUF file."""
    if not (whole := small_object(files, "tokenizer.json")):
        return None
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast  # slow to import, and not needed for token ids

    settings = small_object(files, "tokenizer_config.json")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(whole)), **settings)


@cache
def tell_once(message: str) -> None:
    """Warns, unless it has said so before."""
    logging.getLogger(__name__).warning("%s", message)


def cut(tokenizer: Any, ids: list[int], until: Sequence[str]) -> tuple[str, int, bool]:
    """The text before the first stop string, the number of tokens wholly in it, and whether there was a stop string.

    Stop strings may name special tokens, but the text has none.
    """
    raw = tokenizer.decode(ids, skip_special_tokens=False)
    ends = [raw.find(text) for text in until if text in raw]
    if not ends:
        return str(tokenizer.decode(ids, skip_special_tokens=True)), len(ids), False
    text = raw[: min(ends)]
    kept = bisect_right(
        range(len(ids) + 1), len(text), key=lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=False))
    )
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    return text, kept - 1, True


class ChatTemplate:
    """The chat template of a tokenizer, whose special tokens count where the template itself writes them, only there.

    Where a message spells one, the template gets a private character in its place. So trimming, splitting and other
    work of templates leaves it whole. What is between the template's own special tokens is then encoded as text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special and token.content}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._left_out: dict[str, bool] = {}  # by role
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows definitions of tools, calls and their results."""
        return re.search(r"\btools\b", str(self.tokenizer.chat_template)) is not None  # a template, or several by name

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable of this name, such as `enable_thinking`."""
        return re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)) is not None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        **ending: bool,
    ) -> list[int]:
        """The token ids, up to where the answer begins. Raises ValueError for a message that cannot be read as text.

        `tools`, and `ending`: `add_generation_prompt` and `continue_final_message`, are `apply_chat_template`'s.
        `variables`: others of the template, such as `enable_thinking`. Those that it does not read are left out.
        """
        variables = self._read_of(variables)
        texts = self._readable(messages, tools, variables)
        spelled = sorted({found for text in texts for found in self._spelled.findall(text)})
        if not spelled:
            return list(self._applied(messages, tools, variables, tokenize=True, return_dict=False, **ending))
        free = (chr(number) for number in PRIVATE if not any(chr(number) in text for text in texts))
        private = dict(zip(spelled, free, strict=False))
        public = str.maketrans({character: text for text, character in private.items()})
        hide = partial(self._spelled.sub, lambda found: private[found[0]])
        hidden = [_changed(message, hide) | {"role": message["role"]} for message in messages]
        values = {name: _changed(value, hide) for name, value in variables.items()}
        ids, end, rendered = [], 0, self._applied(hidden, _changed(tools, hide), values, tokenize=False, **ending)
        for own in self._spelled.finditer(rendered):
            ids += self._text(rendered[end : own.start()].translate(public))
            ids.append(self._special[own[0]])
            end = own.end()
        return ids + self._text(rendered[end:].translate(public))

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        **ending: bool,
    ) -> str:
        """What the template writes. Takes and raises what `encode` does."""
        variables = self._read_of(variables)
        self._readable(messages, tools, variables)
        return self._applied(messages, tools, variables, tokenize=False, **ending)

    def _read_of(self, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """The variables that the template reads. Raises ValueError for one that is not the caller's to set."""
        if owned := sorted(OWNED & (variables or {}).keys()):
            raise ValueError(f"{owned[0]} is no variable of the chat template that a request may set: leave it out")
        return {name: value for name, value in (variables or {}).items() if self.reads(name)}

    def _readable(self, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, Any]) -> list[str]:
        """All texts in what the template is given. Raises ValueError."""
        if not self.takes_tools and (tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)):
            raise NoTools(
                "the checkpoint's chat template shows its model no tools, calls or results: leave them out, or put a "
                "chat_template.jinja that shows them beside the weights"
            )
        texts = [encodable(text) for text in texts_in([messages, tools, variables])]
        if any(message["role"] == "system" for message in messages) and self._leaves_out("system"):
            tell_once(
                "the checkpoint's chat template leaves system messages out: put what they say into the user's message"
            )
        for role in {message["role"] for message in messages} - ROLES:
            self._check_role(role)
        return texts

    def _check_role(self, role: str) -> None:
        """Raises ValueError for a role whose messages the template leaves out, or that could make a special token."""
        if any(role in special or special in role for special in self._special):
            raise ValueError(f"role {role!r:.80} is a part of a special token of this tokenizer: use another")
        if self._leaves_out(role):
            raise ValueError(
                f"the checkpoint's chat template leaves out messages of role {role!r:.80}: use system, user, assistant"
            )

    def _leaves_out(self, role: str) -> bool:
        """Whether the text of a message with this role makes no difference."""
        if role not in self._left_out:
            user, own = {"role": "user", "content": "a"}, [{"role": role, "content": text} for text in "ab"]
            pairs = [[one, user] if role == "system" else [user, one] for one in own]
            one, other = (self._applied(pair, None, {}, tokenize=False) for pair in pairs)
            self._left_out[role] = one == other
        return self._left_out[role]

    def _applied(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        **how: Any,
    ) -> Any:
        from jinja2 import TemplateError  # by now transformers has imported it

        own = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self.tokenizer.apply_chat_template([*map(dict, messages)], **variables, **own, **how)
        except (TemplateError, TypeError) as error:  # a TypeError where it adds a text to a list of parts
            raise ValueError(f"the checkpoint's chat template: {error}") from error

    @cached_property
    def _literal(self) -> PreTrainedTokenizerBase:
        """A tokenizer for which no text spells a special token. Its own, as one with two settings suits no threads."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.split_special_tokens = True
        return tokenizer

    def _text(self, text: str) -> list[int]:
        ids = list(self._literal(text, add_special_tokens=False)["input_ids"]) if text else []
        if set(self._special.values()).isdisjoint(ids):
            return ids
        # Some vocabularies hold special tokens as words, too: such a word is read in two parts.
        cuts = [0, *(found.start() + 1 for found in self._spelled.finditer(text)), len(text)]
        parts = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
        if text in parts:
            raise ValueError(f"{text!r:.80} in a message can only be read as a special token of this tokenizer")
        return [number for part in parts for number in self._text(part)]


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A message or a tool with all its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _changed(one, change) for name, one in value.items()}
    return [_changed(one, change) for one in value] if isinstance(value, Sequence) else value


class GrowingText:
    """The text of tokens that come bit by bit, in pieces of which none is taken back."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []  # the last tokens: the text of those before has been told, and stays as it is
        self._told = ""  # of their text
        self._limit = 2 * WINDOW
        self.pending = ""  # text that is there and may still change

    def push(self, ids: Sequence[int], *, last: bool = False) -> str:
        """Takes the tokens that follow and returns the text that is now certain. `last`: no others come."""
        self._ids += ids
        whole = text = self._decode(self._ids)
        if not last:
            # The last character may lack bytes that are in tokens to come, and a tokenizer may drop the space before
            # some of them.
            text = text.rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
            if not text.startswith(self._told):
                return ""
        piece, self.pending = text[len(self._told) :], whole[len(text) :]
        self._told = text
        if len(self._ids) > self._limit:
            self._shorten(whole)
        return piece

    def _shorten(self, whole: str) -> None:
        """Lets go of all but the last tokens, unless their text depends on those before."""
        tail = self._ids[-WINDOW:]
        after = self._decode(tail)
        gone = len(whole) - len(after)
        if whole.endswith(after) and gone <= len(self._told):
            self._ids, self._told = tail, self._told[gone:]
        else:
            self._limit *= 2


class TextStream(Iterator[str]):
    """Pieces of text, in order, none of which is taken back. `completion` is there once the last one is.

    Given up before, by `close` or by leaving it to the garbage collector, it cancels its request.
    """

    def __init__(self, updates: Generator[Update], decode: Decode) -> None:
        """`updates`: of one request, with the new output."""
        self.completion: Completion | None = None
        self._pieces = self._texts(updates, GrowingText(decode))

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    def _texts(self, updates: Generator[Update], text: GrowingText) -> Generator[str]:
        with closing(updates):  # the end of this generator does not end those it reads, not from Python 3.12 on
            for update in updates:
                self.completion = update.completion
                last = update.completion is not None
                if (update.new or last) and (piece := text.push(update.new or [], last=last)):
                    yield piece
