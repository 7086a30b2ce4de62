"""What the commands that train a model in the box share: options, seeds, and the record of a run."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Options = TypeVar("Options")


def parsed(parser: argparse.ArgumentParser, kind: type[Options]) -> tuple[dict[str, Any], Options]:
    """The arguments of `parser`, and the options. Each field of the dataclass `kind` is a flag."""
    defaults = asdict(kind())  # type: ignore[call-overload]
    for name, value in defaults.items():
        extra: dict[str, Any] = {"type": type(value)}
        if isinstance(value, bool):
            extra = {"action": argparse.BooleanOptionalAction}
        parser.add_argument("--" + name.replace("_", "-"), default=value, **extra)
    given = vars(parser.parse_args())
    return given, kind(**{name: given.pop(name) for name in defaults})


def prepare(seed: int) -> None:
    """Seeds torch, and chooses kernels that have a gradient."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["DINFER_KERNELS"] = "torch"
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")


def capturable(device: torch.device) -> AbstractContextManager[Any]:
    """A new stream on CUDA, since the default stream cannot be captured."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()


def write_record(
    file: Path, module: str, device: torch.device, parameters: Iterable[Tensor], options: Any, found: Mapping[str, Any]
) -> None:
    """Writes the record of a run: command, hardware, versions, number of trained parameters, options and `found`."""
    record = {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "hardware": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": sum(parameter.numel() for parameter in parameters),
        "options": {name: value for name, value in asdict(options).items() if value != math.inf},
        **found,
    }
    file.write_text(json.dumps(record) + "\n")
    print(f"{record['steps']} steps in {record['seconds']} s, {record['parameters']} parameters", flush=True)
