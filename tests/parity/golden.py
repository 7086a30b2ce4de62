"""Reads a folder of goldens strictly: a missing field is an error, and a case with an unknown field is skipped.

All rules come from the JSON. Case and file names only form the ids of cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dinfer.core.loading.checkpoint import load_network, read_config
from dinfer.core.registry import MODELS, Registry, options_of
from tests.parity.compare import close

REQUIRED: Any = object()
CPU = torch.device("cpu")
# How many times as far as on a CPU numbers may be from the recorded ones. Both compute in float32; our kernels for CUDA
# add in another order, and take other exponentials. Token ids must be equal on every device.
TOLERANCE = {"cpu": 1.0, "cuda": 4.0}


class GoldenError(ValueError):
    """The golden data are not what they should be."""


class Skip(Exception):
    """The case needs something that dinfer does not have yet; the message says what."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `run` returns a remark, or raises Skip, Mismatch or what went wrong."""

    id: str
    run: Callable[[], str]


class Fields:
    """A JSON object that notes which of its entries were read, so that none is ignored."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise GoldenError(f"{where}: must be an object, not {values!r:.80}")
        self.where, self._values, self._read = where, values, set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        self._read.add(name)
        value = self._values.get(name, default)
        if value is REQUIRED:
            raise GoldenError(f"{self.where}: the field {name!r} is missing")
        return value

    def text(self, name: str) -> str:
        """The entry as a text."""
        value = self.take(name)
        if not isinstance(value, str):
            raise GoldenError(f"{self.where}: {name} must be a text, not {value!r:.80}")
        return value

    def rows(self, name: str, kind: type) -> list[list[Any]]:
        """The entry as a list of lists of numbers of a kind; not an empty one."""
        rows = self.take(name)
        lists = isinstance(rows, list) and rows and all(isinstance(row, list) for row in rows)
        if not lists or not all(type(value) is kind for row in rows for value in row):
            raise GoldenError(f"{self.where}: {name} must be a list of lists of type {kind.__name__}, not {rows!r:.80}")
        return rows

    def fields(self, name: str) -> Fields:
        return Fields(f"{self.where}.{name}", self.take(name))

    def items(self, name: str) -> list[Fields]:
        """The entry as a list of objects."""
        values = self.take(name)
        if not isinstance(values, list):
            raise GoldenError(f"{self.where}: {name} must be a list, not {values!r:.80}")
        return [Fields(f"{self.where}: {name}[{i}]", value) for i, value in enumerate(values)]

    def finish(self) -> None:
        """Raises Skip if there are entries that nobody has read: they may change the rule."""
        left = sorted(self._values.keys() - self._read)
        if left:
            raise Skip(f"{self.where}: no rule for {', '.join(map(repr, left))}")


@dataclass(slots=True)
class Golden:
    """A folder of goldens, the device on which they are checked, and the models loaded so far.

    All that a case takes from files comes to the device here: networks, tensors, and numbers of JSON.
    """

    root: Path
    device: torch.device = CPU
    networks: dict[tuple[Path, bool], Any] = field(default_factory=dict)

    def network(self, folder: str, family: str, adapted: bool = False) -> Any:
        """The model of a folder below the root, in float32. `adapted`: with the adapter there, which drafts take."""
        key = (path := self.root / folder), adapted
        if key not in self.networks:
            known = self.family(folder, family)
            known = replace(known, draft_adapter=str(path)) if adapted else known
            self.networks[key] = load_network(path, known, dtype=torch.float32, device=self.device)
        return self.networks[key]

    def tensors(self, path: Path, *names: str) -> list[Tensor]:
        """Some tensors of a safetensors file. Raises GoldenError if one is missing."""
        try:
            with safe_open(path, framework="pt") as file:
                if missing := [name for name in names if name not in file.keys()]:  # noqa: SIM118, it is no mapping
                    raise GoldenError(f"{path} lacks the tensor {missing[0]!r}")
                return [file.get_tensor(name).to(self.device) for name in names]
        except (OSError, SafetensorError) as error:
            raise GoldenError(f"{path} cannot be read: {error}") from error

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Numbers of JSON as a tensor."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def close(self, where: str, want: Tensor, got: Tensor, *, atol: float, rtol: float) -> float:
        """`compare.close` with bounds of this device, of which the recorded ones are those of a CPU."""
        factor = TOLERANCE[self.device.type]
        return close(where, want, got, atol=factor * atol, rtol=factor * rtol)

    def name(self, path: Path) -> str:
        """The id of a file: its path below the root, without suffix."""
        return path.relative_to(self.root).with_suffix("").as_posix()

    def family(self, folder: str, family: str) -> Any:
        """The registered family of a model folder, recognised by its config.json. Raises Skip if there is none."""
        path = self.root / folder
        if not (path / "config.json").is_file():
            raise Skip(f"{folder} is not in this folder")
        config = read_config(path)
        name = next((name for name in MODELS.names() if MODELS.get(name).matches(config)), None)
        if name is not None:
            # Some configs are silent about the mask token. Every run brings its own; the logits do not depend on it.
            masked = "mask_id" in [info.name for info in options_of(MODELS.get(name))]
            mask = {"mask_id": 0} if masked and "mask_token_id" not in config else {}
            return MODELS.build({"name": name, "checkpoint": str(path)} | mask)
        if family in MODELS.names():
            raise GoldenError(f"{folder}/config.json is not of the family {family!r}")
        raise Skip(f"model family {family!r} is not registered")


def need(registry: Registry, *names: str) -> None:
    """Raises Skip for the first name that is not registered."""
    for name in names:
        if name not in registry.names():
            raise Skip(f"{registry.kind} {name!r} is not registered")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GoldenError(f"{path} cannot be read: {error}") from error
