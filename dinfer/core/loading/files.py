"""A checkpoint's files: in the package, in a folder or on the hub; and the JSON among them. Imports no torch.

The mask and stop tokens are sought in config.json and its `text_config`, then in generation_config.json, then in the
tokenizer's files, which know tokens by name. If no file names a token, the family's published default holds
(`published_*` in `models`).
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from dinfer.core.options import unknown
from dinfer.core.provided import needed as from_layer
from dinfer.core.provided import provided

POINTER = "version https://git-lfs"
FETCH = "is a pointer that git-lfs left in place of the file: run `git lfs pull` in its folder"
SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "README.md")  # files that describe a checkpoint
HUB = "models--"  # how the name of a folder of the hub's cache begins
GGUF = ".gguf"  # the ending of a file that is a whole checkpoint
ADAPTER = "adapter_config.json"
QUANTIZATION = "quantization_config"  # of config.json: how weights were rounded
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
PUBLISHED = "published default of the family"


class CheckpointError(ValueError):
    """The checkpoint is damaged, not supported, or does not fit its family. The message says where."""


SmallFiles = Path | Mapping[str, dict[str, Any]]
"""The files that describe a checkpoint: its folder, or by name what they would hold, from a GGUF file's metadata."""


def small_object(files: SmallFiles, name: str) -> dict[str, Any]:
    """The JSON object in a small file; empty if it is not there, unless it is config.json. Raises as `read_object`."""
    if not isinstance(files, Path):
        return files.get(name, {})
    return read_object(files / name) if name == CONFIG or (files / name).is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError, OSError."""
    try:
        pointer = (text := path.read_text("utf-8-sig")).startswith(POINTER)
        found = None if pointer else json.loads(text)
    except ValueError as error:  # not JSON, or not even text
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if pointer:
        raise CheckpointError(f"{path} {FETCH}")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {found!r:.80}")
    return found


def damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    """The error for a file of weights that is not of its `kind`. `error`: its reader's."""
    with path.open("rb") as file:
        pointer = file.read(len(POINTER)) == POINTER.encode()
    size = f"{path.stat().st_size:,} bytes"
    what = FETCH if pointer else f"is truncated, damaged or no {kind} file: it has {size} ({error}). Get it once more"
    return CheckpointError(f"{path} {what}")


def refuse(problems: Sequence[str], what: str) -> None:
    """Raises a CheckpointError with `what` and the first twenty problems, if there are any."""
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{what}:\n  {shown}{more}")


def boxed(needed: str = "config.json") -> list[str]:
    """The names of the models in the package; of its adapters if `needed` is an adapter's file."""
    folder = resources.files("dinfer") / "demo" / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / needed).is_file())


def locate(
    name: str, revision: str | None = None, needed: str = "config.json",
    wanted: Sequence[str] = (*SMALL, "*.safetensors"),
) -> Path:  # fmt: skip
    """The folder of a checkpoint, or its GGUF file: a model in the box, a local path, or a download from the hub.

    `needed`: the file that the folder must have. `wanted`: patterns of the files to download, never code or pickles.
    Raises CheckpointError.
    """
    if not name.strip():
        raise CheckpointError(f"checkpoint={name!r} names no model: give one in the box, a folder or a hub name")
    path = local(name)
    if path.name.startswith(HUB) and path.is_dir():
        path = from_layer("snapshot_of", f"{path}, a folder of the hub's cache,", "families")(path)
    weights = path.suffix == GGUF
    if weights and not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    if path.is_file() and not weights:
        raise CheckpointError(f"{path} is a file: give the folder of a checkpoint, or a file whose name ends in {GGUF}")
    if revision is not None and (name in boxed(needed) or path.exists()):
        raise CheckpointError(f"revision={revision!r} is for checkpoints on the hub, and {name!r} is not one")
    if weights:
        return path
    if name in boxed(needed):
        path = Path(str(resources.files("dinfer") / "demo" / "checkpoints" / name))
    elif not path.is_dir():
        fetched = provided("fetched")
        if fetched is not None and (found := fetched(name, revision)) is not None:
            return found
        if name in boxed("adapter_config.json"):
            raise CheckpointError(
                f"{name!r} is an adapter, not a checkpoint: load the model that it changes with adapter={name!r}, or "
                f"use the preset {name}"
            )
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            presets = boxed("adapter_config.json") if needed == "config.json" else []  # each has one of its name
            known = unknown("checkpoint", name, sorted({*boxed(needed), *presets}))
            good = "A folder, a GGUF file or a hub name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too."
            raise CheckpointError(f"{known} {good}")
        path = from_layer("download", f"checkpoint={name}, a name on the hub,", "families")(name, revision, wanted)
    if not (path / needed).is_file():
        files = sorted(str(file) for file in path.glob(f"*{GGUF}"))
        good = f"give one of its GGUF files, such as {files[0]}" if files else "a Hugging Face model folder is needed"
        raise CheckpointError(f"{path} has no {needed}: {good}")
    return path


def local(name: str) -> Path:
    """The file or folder that a name may be. `~user` stays as it is if there is no such user."""
    return Path(os.path.expanduser(name))


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


def token_ids(folder: SmallFiles, config: Mapping[str, Any]) -> TokenIds:
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


def _configured(folder: SmallFiles, config: Mapping[str, Any], field: str) -> Iterator[TokenId]:
    """The token ids of a field in config.json and generation_config.json."""
    text = config.get("text_config")
    for part, where, file in (
        (config, field, CONFIG),
        (text if isinstance(text, Mapping) else {}, f"text_config.{field}", CONFIG),
        (small_object(folder, GENERATION), field, GENERATION),
    ):
        yield from (TokenId(token, file) for token in listed(part.get(field), where, file))


def _named(folder: SmallFiles, role: str) -> list[TokenId]:
    """The id of the text that the tokenizer's files give a role."""
    names = [name for one, name in named_roles(folder) if one == role]
    for name in dict.fromkeys(names):
        for file, known in vocabularies(folder):
            if name in known:
                return [TokenId(token, file) for token in listed(known[name], f"id of {name!r}", file)]
    return []


def named_roles(folder: SmallFiles) -> Iterator[tuple[str, str]]:
    """Roles, such as mask_token, and their texts in the tokenizer's files."""
    for file in (TOKENIZER, "special_tokens_map.json"):
        for role, token in small_object(folder, file).items():
            if role.endswith(("_token", "_tokens")):
                texts = [_content(one) for one in (token if isinstance(token, list) else [token])]
                yield from ((role, text) for text in texts if text is not None)


def vocabularies(folder: SmallFiles) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Files, and the ids of the texts in each. The smallest file comes first, since it usually suffices."""
    decoder = _part(small_object(folder, TOKENIZER), "added_tokens_decoder", {}, TOKENIZER)
    yield TOKENIZER, {_content(entry): int(token) if token.isdecimal() else token for token, entry in decoder.items()}
    file = "tokenizer.json"
    whole = small_object(folder, file)
    vocab = _part(whole, "model", {}, file).get("vocab")
    added = _part(whole, "added_tokens", [], file)
    known = {_content(entry): entry.get("id") for entry in added if isinstance(entry, dict)}
    yield file, (vocab if isinstance(vocab, dict) else {}) | known
    yield "added_tokens.json", small_object(folder, "added_tokens.json")


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


class Fields(dict[str, Any]):
    """The fields of a config.json. It notes which of them somebody looks at.

    A copy looks at all of them, but `|` and `like` do not.
    """

    # Those that change no network: who wrote it, how it was trained, stored and sampled, and what is read elsewhere.
    # `sliding_window` and `max_window_layers` count with `use_sliding_window` alone, which families check.
    HARMLESS: ClassVar = {
        "_attn_implementation", "_name_or_path", "architectures", "attn_implementation", "auto_map", "bos_token_id",
        "do_sample", "dtype", "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_decoder",
        "label2id", "mask_token_id", "max_length", "max_new_tokens", "max_window_layers", "min_length", "model_type",
        "name_or_path", "num_beams", "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
        "pad_token_id", "pretraining_tp", "problem_type", "quantization_config", "repetition_penalty", "return_dict",
        "router_aux_loss_coef", "sep_token_id", "sliding_window", "task_specific_params", "temperature",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "unk_token_id",
        "unsloth_fixed", "unsloth_version", "use_cache",
    }  # fmt: skip

    def __init__(self, given: Mapping[str, Any], seen: set[str] | None = None, root: str = "") -> None:
        super().__init__(given)
        self.seen, self.root = set[str]() if seen is None else seen, root

    def like(self, given: Mapping[str, Any]) -> "Fields":
        """Other fields, looks at which count as looks at these."""
        return Fields(given, self.seen, self.root)

    def __or__(self, other: Mapping[str, Any]) -> "Fields":  # type: ignore[override]
        return self.like(dict(self.items()) | dict(other))

    def __iter__(self) -> Iterator[str]:  # so that a copy asks for every value
        return super().__iter__()

    def _looked(self, name: Any, value: Any) -> Any:
        self.seen.add(f"{self.root}{name}")
        return Fields(value, self.seen, f"{self.root}{name}.") if type(value) is dict else value

    def __getitem__(self, name: str) -> Any:
        return self._looked(name, super().__getitem__(name))

    def __contains__(self, name: object) -> bool:
        self._looked(name, None)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self._looked(name, super().get(name, default))

    def setdefault(self, name: str, default: Any = None) -> Any:
        return self._looked(name, super().setdefault(name, default))

    def unread(self, harmless: Collection[str]) -> dict[str, Any]:
        """Fields that nobody looked at and that may change the network: null, false and 0 switch nothing on."""
        found: dict[str, Any] = {}
        for name, value in self.items():
            path = f"{self.root}{name}"
            if type(value) is dict and any(seen.startswith(f"{path}.") for seen in self.seen):
                found |= Fields(value, self.seen, f"{path}.").unread(harmless)
            elif (
                value
                and path not in self.seen
                and not ({path, name} & {*self.HARMLESS, *harmless} or name.endswith(("_dropout", "_pdrop")))
            ):
                found[path] = value
        return found
