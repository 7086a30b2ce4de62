"""Says what a checkpoint is and whether it loads, from its small files and the headers of its weights.

It calls the functions that load a checkpoint, and reads everything but the values of tensors.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError

from dinfer.core.layers.format import PLAIN
from dinfer.core.layers.linear import formatted
from dinfer.core.loading.checkpoint import LoadPlan, empty_network, family_of, headers, layout, read_spec, small_files
from dinfer.core.loading.files import (
    CONFIG,
    GGUF,
    PUBLISHED,
    TOKENIZER,
    CheckpointError,
    SmallFiles,
    TokenIds,
    named_roles,
    read_object,
    small_object,
    token_ids,
    vocabularies,
)
from dinfer.core.loading.safetensors_io import (
    FLOATS,
    INDEX,
    SINGLE,
    Stored,
    refuse_absent,
    stored,
    stored_in,
    weight_map,
)
from dinfer.core.models.family import ModelFamily, Placement
from dinfer.core.provided import provided
from dinfer.core.registry import MODELS
from dinfer.core.terms.spec import ModelSpec
from dinfer.formats.holding import format_of, roundings
from dinfer.formats.quantized import FIELD, SCALES, packed, packed_names, packing, scale_block, spare_biases
from dinfer.formats.small_floats import joined, scheme_of, small_names

CHAT = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And times 3?"},
)
"""A chat that shows what the chat template does."""
TEMPLATE = "chat_template.jinja"
METADATA = "metadata of the GGUF file"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A special token. `source`: the file, option or default that gives its id."""

    role: str
    id: int | None
    text: str | None
    source: str | None


@dataclass(slots=True)
class Inspection:
    """What the files say of a checkpoint; None or empty if they do not say."""

    folder: Path  # or a GGUF file
    files: SmallFiles | None = None  # the small files; None: they cannot be read
    family: str | None = None
    spec: ModelSpec | None = None
    dtype: torch.dtype | None = None  # of the weights
    packing: str | None = None  # how integers pack the weights
    parameters: int | None = None
    active: int | None = None  # parameters that one token uses
    # Bytes of the loaded network, by `quantize`; `blocks`: of a GGUF file on a CPU, without `quantize`.
    memory: dict[str, int | None] = field(default_factory=dict)
    expected: int | None = None  # number of tensors that the family wants
    stored: int | None = None  # number of tensors in the files or their index
    types: dict[str, int] = field(default_factory=dict)  # number of tensors of each type, in the files at hand
    total_size: int | None = None  # bytes of all tensors, from the index
    tokens: list[SpecialToken] = field(default_factory=list)
    template: str | None = None  # the file that holds the chat template
    chat: str | None = None  # the text of `CHAT` for the model
    complete: bool = False  # the files of all tensors are at hand
    problems: list[str] = field(default_factory=list)  # each keeps the model from loading or from chatting
    unknown: list[str] = field(default_factory=list)  # what no file at hand says

    @property
    def loads(self) -> bool | None:
        """Whether it loads and answers; None: that cannot be said without the weights."""
        return False if self.problems else self.complete or None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Turns an error into a problem, so that the inspection goes on with other files."""
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:  # torch raises RuntimeError for impossible sizes
            self.problems += [str(error)] if str(error) not in self.problems else []


def inspect(folder: Path, given: Mapping[str, Any]) -> Inspection:
    """Reads the files in `folder`; their errors become `problems`.

    `given`: the options of the family, such as `block`, and its `name`; without a name, config.json decides. Raises
    ValueError for wrong options.
    """
    found, family = Inspection(folder), MODELS.build(given) if "name" in given else None
    config: dict[str, Any] = {}
    ids = TokenIds(None, ())
    with found.noting():
        found.files = small_files(folder)
    if (files := found.files) is None:
        return found
    with found.noting():
        config = small_object(files, CONFIG)
        found.family = family_of(config)
    if found.family is not None:
        family = family or MODELS.build({"name": found.family, **given})
        with found.noting():
            ids = token_ids(files, config)
            found.spec = read_spec(family, config | ids.fields() | {FIELD: None}, folder)
    with found.noting():
        _describe_weights(found, family, config)
    with found.noting():
        found.tokens = [*_tokens(found, files, given, ids)]
    with found.noting():
        _check_tokenizer(files)
    with found.noting():
        _render_chat(found, files)
    if folder.suffix == GGUF:
        found.template = found.template and METADATA
        files_of = (CONFIG, "tokenizer.json", TOKENIZER)
        found.tokens = [replace(one, source=METADATA) if one.source in files_of else one for one in found.tokens]
    return found


def _describe_weights(found: Inspection, family: ModelFamily | None, config: Mapping[str, Any]) -> None:
    """Notes parameters, memory, and the problems of the tensors."""
    own, stored = _stored(found, family)
    how = packing(config)
    small = scheme_of(config)
    names, files = small_names(packed_names(own, how), small), joined(packed(stored, how), small)
    found.packing = how and str(how)
    if family is None or (spec := found.spec) is None:
        return
    found.types = dict(Counter(tensor.dtype for tensor in files.values()))
    placements = layout(family, spec, dict.fromkeys(names))
    found.dtype = _dtype(found, config, [files[name] for name in placements if name in files])
    spare = spare_biases(own, how, placements)
    absent = [name for name in names or placements if name not in files and name not in spare]
    expected = _as_expected(absent, placements, found.dtype, config)
    plan = LoadPlan.of(found.folder, family, spec, config, stored | expected)
    found.expected = len(plan.placements)
    found.parameters = sum(math.prod(place.shape) for place in plan.placements.values())
    found.active = found.parameters
    if (experts := spec.experts) is not None:
        idle = (spec.layers - len(experts.dense)) * (experts.experts - experts.chosen)
        found.active -= idle * 3 * experts.width * spec.hidden
    wrong = [*plan.problems()]
    if not (wrong or files or plan.scales.stored) and found.stored == found.expected:
        wrong = [*_contradiction(found, plan.placements)]
    found.problems += _gathered(wrong)
    found.complete = bool(files) and not found.problems
    if found.complete:
        with found.noting():
            plan.check_values()
        if (check := provided("check_tower")) is not None:
            with found.noting():
                check(family, found.folder, spec)
    if not wrong:
        found.memory = _memory(found, plan, found.dtype)


def _stored(found: Inspection, family: ModelFamily | None) -> tuple[Collection[str], dict[str, Stored]]:
    """The names of all tensors in the files or their index, and the headers of those in files at hand."""
    files: dict[str, Stored] = {}
    if found.folder.suffix == GGUF:
        if family is not None and found.spec is not None:
            files = headers(found.folder, family, found.spec)
            found.stored = len(files)
        return files, files
    if (found.folder / INDEX).is_file():
        where = weight_map(found.folder)
        metadata = read_object(found.folder / INDEX).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        found.total_size = int(total) if isinstance(total, (int, float)) and 0 < total < 2**63 else None
    elif (found.folder / SINGLE).is_file():
        where = dict.fromkeys(stored_in(found.folder / SINGLE), SINGLE)
    else:
        if any([*found.folder.glob("*.bin"), *found.folder.glob("*.safetensors")]):
            stored(found.folder)  # raises the error that says why it does not read them
        found.unknown.append(f"names and shapes of the tensors: neither {SINGLE} nor {INDEX} is here")
        return [], files
    shards = sorted(set(where.values()))
    absent = [file for file in shards if not (found.folder / file).is_file()]
    if absent == shards:
        found.unknown.append(f"shapes of the tensors: none of the files that {INDEX} names is here")
    else:
        with found.noting():
            refuse_absent(found.folder, absent)
    for file in shards:
        if file not in absent:
            with found.noting():
                files |= stored_in(found.folder / file)
    names = dict.fromkeys(name for name, file in where.items() if file in absent) | files
    found.stored = len(names)
    return names, files


def _dtype(found: Inspection, config: Mapping[str, Any], stored: Iterable[Stored]) -> torch.dtype:
    """The dtype of the first tensor of floats, as in loading; without files that of config.json."""
    for tensor in stored:
        if tensor.floats is not None:
            return tensor.floats
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    said = [part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name) is not None]
    dtype = DTYPES.get(str(said[0]).removeprefix("torch.")) if said else None
    if dtype is None:
        says = f"dtype={said[0]!r:.40}" if said else "no dtype"
        found.unknown.append(f"dtype of the weights: {CONFIG} has {says}; the memory is that in bfloat16")
    return dtype or torch.bfloat16


def _as_expected(
    names: Sequence[str], placements: Mapping[str, Placement], dtype: torch.dtype, config: Mapping[str, Any]
) -> dict[str, Stored]:
    """Stand-ins for tensors with unknown headers: they have the shapes and dtypes that the network wants."""
    quantized, block = config.get(FIELD) or {}, scale_block(config)
    narrow = "I8" if str(quantized.get("format")).startswith("int") else "F8_E4M3"
    matrices = [name for name, place in placements.items() if quantized and len(place.shape) > 1]
    owners = {f"{name}{end}": name for name in matrices for end in SCALES}
    plain = next(name for name, one in FLOATS.items() if one == dtype)
    narrowed = {owners[name] for name in names if name in owners}
    found = {}
    for name in names:
        shape = placements[name].shape if name in placements else ()
        if name in owners:
            *lead, rows, width = placements[owners[name]].shape
            shape = (*lead, rows) if block is None else (*lead, -(-rows // block[0]), -(-width // block[1]))
        found[name] = Stored(Path(INDEX), name, shape, narrow if name in narrowed else plain)
    return found


def _contradiction(found: Inspection, placements: Mapping[str, Placement]) -> Iterator[str]:
    """Reports a `total_size` in the index that does not fit the shapes, which follow from config.json.

    All tensors have the same width, except that vectors and routers may be in float32 beside others in 16 bits.
    """
    free = sum(
        math.prod(place.shape)
        for place in placements.values()
        if len(place.shape) == 1 or place.parameter.endswith("router.weight")
    )
    every, total = found.parameters or 0, found.total_size
    if total is not None and not any(0 <= total - every * width <= free * 2 for width in (2, 4, 8)):
        yield (
            f"{INDEX}: total_size={total} is not that of {every} parameters in 16, 32 or 64 bits, which {CONFIG} "
            "describes: a tensor must have another shape"
        )


def _gathered(problems: Iterable[str]) -> Iterator[str]:
    """The problems, with those joined that differ only in the numbers of layers and experts."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", problem), []).append(problem)
    for pattern, found in alike.items():
        yield found[0] if len(found) == 1 else f"{pattern} ({len(found)} tensors)"


def _memory(found: Inspection, plan: LoadPlan, dtype: torch.dtype) -> dict[str, int | None]:
    """Bytes of the loaded network, by `quantize`; None if its layers cannot be rounded to that."""

    def empty(dtype: torch.dtype, formats: Mapping[str, Any]) -> Any:
        return empty_network(plan.family, plan.spec, dtype, torch.device("meta"), formats)

    memory: dict[str, int | None] = {}
    tower = provided("tower_bytes") if found.complete else None
    beside = 0 if tower is None else tower(plan.family, found.folder, dtype)
    if found.folder.suffix == GGUF and (blocks := plan.formats(torch.float32, blocks=True)):
        memory["blocks"] = _bytes(empty(torch.float32, blocks))
    network: Any = None
    now = None
    for name in ("none", *roundings()):
        held = plan.formats(dtype, None if name == "none" else name)
        kept = {path: (type(format), vars(format)) for path, format in held.items()}
        if kept != now:
            now = kept
            network = empty(dtype, held)
        size = _bytes(network) + beside
        try:
            for module, own in formatted(network).values() if name != "none" else ():
                if module.formats[own] is PLAIN:
                    weight = module.get_parameter(own)
                    size += format_of(name).nbytes(weight.shape, weight.dtype) - weight.nbytes
            memory[name] = size
        except ValueError as error:
            memory[name] = None
            found.unknown.append(str(error))
    return memory


def _bytes(network: Any) -> int:
    return sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))


def _tokens(found: Inspection, files: SmallFiles, given: Mapping[str, Any], ids: TokenIds) -> Iterator[SpecialToken]:
    """The mask token and the stop tokens, then all tokens with a role in the tokenizer's files."""
    known: dict[str, tuple[Any, str]] = {}
    for file, vocabulary in vocabularies(files):
        known = {text: (token, file) for text, token in vocabulary.items()} | known
    texts = {token: text for text, (token, _) in known.items() if type(token) is int}
    if not texts:
        found.unknown.append("texts of the tokens: no tokenizer file here has them")
    if (spec := found.spec) is not None:
        options = dict.fromkeys(given.get("stop_ids") or (), "model.stop_ids")
        stops = options | {stop.id: stop.source for stop in ids.stops}
        if spec.mask_id is not None:
            named = PUBLISHED if ids.mask is None else ids.mask.source
            named = named if given.get("mask_id") is None else "model.mask_id"
            yield SpecialToken("mask", spec.mask_id, texts.get(spec.mask_id), named)
        for stop in spec.stop_ids:
            yield SpecialToken("stop", stop, texts.get(stop), stops.get(stop, PUBLISHED))
    for role, text in dict.fromkeys(named_roles(files)):
        token, source = known.get(text, (None, ""))
        yield SpecialToken(role, token if type(token) is int else None, text, source or None)


def _check_tokenizer(files: SmallFiles) -> None:
    """Raises ValueError for a tokenizer.json that is JSON, but no tokenizer."""
    if isinstance(files, Path) and small_object(files, "tokenizer.json"):
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(files / "tokenizer.json"))
        except Exception as error:  # the package raises bare ones
            raise ValueError(f"{files / 'tokenizer.json'} cannot be read: {error}. Get it once more") from error


def _render_chat(found: Inspection, files: SmallFiles) -> None:
    """Renders `CHAT` with the chat template, as the tokenizer does."""
    file, template = TOKENIZER, small_object(files, TOKENIZER).get("chat_template")
    if isinstance(files, Path) and (files / TEMPLATE).is_file():
        file, template = TEMPLATE, (files / TEMPLATE).read_text(encoding="utf-8")
    if isinstance(template, list):  # of named templates
        template = next((one for one in template if isinstance(one, dict) and one.get("name") == "default"), None)
        template = template and template.get("template")
    elif isinstance(template, dict):
        template = template.get("default")
    if template is None:
        found.unknown.append(f"chat template: neither {TEMPLATE} nor {TOKENIZER} has one")
        return
    if not isinstance(template, str):
        raise CheckpointError(f"{file}: chat_template={template!r:.80} must be a text")
    from transformers.utils import chat_template_utils  # slow to import

    render: Any = chat_template_utils.render_jinja_template
    roles = {role: text for role, text in named_roles(files) if role.endswith("_token")}
    try:
        texts, _ = render([list(CHAT)], chat_template=template, add_generation_prompt=True, **roles)
    except (TemplateError, TypeError, ArithmeticError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{file}: the chat template fails: {error}") from error
    found.template, found.chat = file, texts[0]
