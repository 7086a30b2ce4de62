"""What every benchmark writes: its command, `dinfer.lab.provenance`, and its figures."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch

from dinfer.lab.provenance import provenance as found


def provenance(device: torch.device) -> dict[str, Any]:
    """The command with the variables that change figures, commit, versions and hardware."""
    spec = sys.modules["__main__"].__spec__
    module = [spec.name] if spec else [sys.argv[0]]
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("DINFER_")]
    settings = [setting for setting in settings if not setting.startswith("DINFER_COMMIT=")]
    return {"command": " ".join([*settings, "python", "-m", *module, *sys.argv[1:]])} | found(device)


def command_line(doc: str | None, device: str | None = None) -> ArgumentParser:
    """A parser with `--out`, and with `--device` if a default is given."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    if device is not None:
        parser.add_argument("--device", default=device)
    return parser


def begun(given: Namespace, device: torch.device) -> dict[str, Any]:
    """The head of a report: the arguments without `out`, and the provenance."""
    return {"setting": vars(given) | {"out": None}, **provenance(device)}


def save(report: dict[str, Any], out: Path | None) -> None:
    """Writes the report if `--out` names a file. Call it after every run, so that an aborted run leaves figures."""
    if out is not None:
        out.with_name(out.name.removesuffix(".json") + ".json").write_text(
            json.dumps(report, indent=1, default=str) + "\n"
        )


def show(report: dict[str, Any], out: Path | None) -> None:
    """Prints a report and saves it."""
    print(json.dumps(report, indent=1, default=str))
    save(report, out)
