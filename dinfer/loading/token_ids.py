"""The mask and stop tokens of a checkpoint, and the file that names each.

It looks in config.json and its `text_config`, then in generation_config.json, then in the tokenizer's files, which know
tokens by name. If no file names a token, the family's published default holds (`published_*` in `models`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dinfer.loading.files import CheckpointError, Folder, SmallFile, read_object

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
PUBLISHED = "published default of the family"


@dataclass(frozen=True, slots=True)
class TokenId:
    """A token and its source: a file of the checkpoint, or `PUBLISHED`."""

    id: int
    source: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """The tokens that the files of a checkpoint name."""

    mask: TokenId | None  # None: no file names it
    stops: tuple[TokenId, ...]  # each once, EOS first

    def fields(self) -> dict[str, Any]:
        """The same as fields of a config.json, without those that no file names."""
        mask = {} if self.mask is None else {"mask_token_id": self.mask.id}
        return mask | ({"eos_token_id": [stop.id for stop in self.stops]} if self.stops else {})


def token_ids(folder: Folder, config: Mapping[str, Any]) -> TokenIds:
    """The mask token and all stop tokens that the files in `folder` name. `config` is its config.json.

    Raises a CheckpointError that names file, field and value if a value is outside the vocabulary.
    """
    masks = [*_configured(folder, config, "mask_token_id")] or _named(folder, "mask_token")
    stops = [*_configured(folder, config, "eos_token_id")] or _named(folder, "eos_token")
    vocab = config.get("embedding_size") or config.get("vocab_size")
    for field, found in (("mask_token_id", masks), ("eos_token_id", stops)):
        for token in found:
            if type(vocab) is int and token.id >= vocab:
                raise CheckpointError(f"{token.source}: {field}={token.id} is outside the vocabulary of {vocab}")
    first = {token.id: token for token in reversed(stops)}
    return TokenIds(masks[0] if masks else None, tuple(first[i] for i in dict.fromkeys(stop.id for stop in stops)))


def listed(value: Any, field: str, file: str = CONFIG) -> tuple[int, ...]:
    """The token ids of a field, which holds one or null; `eos_token_id` may hold a list. Raises CheckpointError."""
    several = field.endswith("eos_token_id")
    found = () if value is None else tuple(value) if several and isinstance(value, list) else (value,)
    if value == [] or not all(type(token) is int and token >= 0 for token in found):
        raise CheckpointError(
            f"{file}: {field}={value!r} must be a token id{', a list of them,' if several else ''} or null"
        )
    return found


def _configured(folder: Folder, config: Mapping[str, Any], field: str) -> Iterator[TokenId]:
    """The token ids of a field in config.json and generation_config.json."""
    text = config.get("text_config")
    for part, where, file in (
        (config, field, CONFIG),
        (text if isinstance(text, Mapping) else {}, f"text_config.{field}", CONFIG),
        (_object(folder / GENERATION), field, GENERATION),
    ):
        yield from (TokenId(token, file) for token in listed(part.get(field), where, file))


def _named(folder: Folder, role: str) -> list[TokenId]:
    """The id of the text that the tokenizer's files give a role."""
    names = [name for one, name in named_roles(folder) if one == role]
    for name in dict.fromkeys(names):
        for file, known in vocabularies(folder):
            if name in known:
                return [TokenId(token, file) for token in listed(known[name], f"id of {name!r}", file)]
    return []


def named_roles(folder: Folder) -> Iterator[tuple[str, str]]:
    """Roles, such as mask_token, and their texts in the tokenizer's files."""
    for file in (TOKENIZER, SPECIAL):
        for role, token in _object(folder / file).items():
            if role.endswith(("_token", "_tokens")):
                texts = [_content(one) for one in (token if isinstance(token, list) else [token])]
                yield from ((role, text) for text in texts if text is not None)


def vocabularies(folder: Folder) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Files, and the ids of the texts in each. The smallest file comes first, since it usually suffices."""
    decoder = _part(_object(folder / TOKENIZER), "added_tokens_decoder", {}, TOKENIZER)
    yield TOKENIZER, {_content(entry): int(token) if token.isdecimal() else token for token, entry in decoder.items()}
    file = "tokenizer.json"
    whole = _object(folder / file)
    vocab = _part(whole, "model", {}, file).get("vocab")
    added = _part(whole, "added_tokens", [], file)
    known = {_content(entry): entry.get("id") for entry in added if isinstance(entry, dict)}
    yield file, (vocab if isinstance(vocab, dict) else {}) | known
    yield "added_tokens.json", _object(folder / "added_tokens.json")


def _part(found: Mapping[str, Any], field: str, empty: Any, file: str) -> Any:
    """A field that must be of the type of `empty`, an object or a list; `empty` if it is absent or null."""
    value = found.get(field)
    if value is not None and not isinstance(value, type(empty)):
        raise CheckpointError(f"{file}: {field}={value!r:.80} must be {'an object' if empty == {} else 'a list'}")
    return value or empty


def _content(token: Any) -> str | None:
    """The text of a token, which is a text or an object with its properties."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _object(path: SmallFile) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
