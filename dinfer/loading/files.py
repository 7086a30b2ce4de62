"""A checkpoint's files: in the package, in a folder or on the hub; and the JSON among them. Imports no torch."""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies

from dinfer.recipe.registry import unknown

POINTER = "version https://git-lfs"
FETCH = "is a pointer that git-lfs left in place of the file: run `git lfs pull` in its folder"


class CheckpointError(ValueError):
    """The checkpoint is damaged, not supported, or does not fit its family. The message says where."""


class SmallFile(Protocol):
    """A file that describes a checkpoint: a `Path`, or a part of a GGUF file's metadata."""

    def is_file(self) -> bool: ...

    def read_text(self, encoding: str | None = None) -> str: ...


class Folder(Protocol):
    """The small files of a checkpoint: a `Path`, or a GGUF file."""

    def __truediv__(self, name: str, /) -> SmallFile: ...


def read_object(path: SmallFile) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError, OSError."""
    try:
        pointer = (text := path.read_text()).startswith(POINTER)
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


SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "README.md")  # files that describe a checkpoint
WANTED = (*SMALL, "*.safetensors")  # never code, never pickles
GGUF = ".gguf"  # the ending of a file that is a whole checkpoint
PATIENCE = 2.0  # seconds for a first connection; the hub's client waits a minute if packets are dropped


def boxed(needed: str = "config.json") -> list[str]:
    """The names of the models in the package; of its adapters if `needed` is an adapter's file."""
    folder = resources.files("dinfer") / "demo" / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if (item / needed).is_file())


def locate(name: str, revision: str | None = None, needed: str = "config.json", wanted: Sequence[str] = WANTED) -> Path:
    """The folder of a checkpoint, or its GGUF file: a model in the box, a local path, or a download from the hub.

    `needed`: the file that the folder must have. `wanted`: patterns of the files to download. Raises CheckpointError.
    """
    if not name.strip():
        raise CheckpointError(f"checkpoint={name!r} names no model: give one in the box, a folder or a hub name")
    path = snapshot_of(local(name))
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
        if name in boxed("adapter_config.json"):
            raise CheckpointError(
                f"{name!r} is an adapter, not a checkpoint: load the model that it changes with adapter={name!r}, or "
                f"use the preset {name}"
            )
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            known = unknown("checkpoint", name, boxed(needed))
            good = "A folder, a GGUF file or a hub name such as 'GSAI-ML/LLaDA-8B-Instruct' is good too."
            raise CheckpointError(f"{known} {good}")
        path = download(name, revision, wanted)
    if not (path / needed).is_file():
        files = sorted(str(file) for file in path.glob(f"*{GGUF}"))
        good = f"give one of its GGUF files, such as {files[0]}" if files else "a Hugging Face model folder is needed"
        raise CheckpointError(f"{path} has no {needed}: {good}")
    return path


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder with a model's files, downloaded or from the cache. Raises CheckpointError."""
    from huggingface_hub import constants, errors, snapshot_download  # slow to import, and not needed for folders

    offline = constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=[*patterns], local_files_only=offline)
    except errors.LocalEntryNotFoundError as error:
        why = f"{constants.ENDPOINT} cannot be reached" if offline else str(error).splitlines()[0]
        why = "HF_HUB_OFFLINE is set: unset it" if constants.HF_HUB_OFFLINE else f"{why}: connect to the network"
        raise CheckpointError(
            f"{name} is not in {constants.HF_HUB_CACHE}, and {why}; or run `hf download {name}` elsewhere, bring the "
            "folder here and give it as model.checkpoint=FOLDER"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{constants.ENDPOINT}/{name} cannot be read: {' '.join(str(error).split()):.300} Check the name and the "
            "revision. If the model is gated or private, accept its terms on that page and log in with `hf auth login`"
        ) from error
    return Path(found)


def local(name: str) -> Path:
    """The file or folder that a name may be. `~user` stays as it is if there is no such user."""
    return Path(os.path.expanduser(name))


def snapshot_of(folder: Path) -> Path:
    """The files in a folder of the hub's cache, `models--OWNER--NAME`, by its branch main. Other paths as they are.

    Raises CheckpointError for such a folder that does not say which of its snapshots is meant.
    """
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if not folder.name.startswith("models--") or not snapshots.is_dir():
        return folder
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if main.is_file() and (named := snapshots / main.read_text().strip()) in found:
        return named
    if len(found) == 1:
        return found[0]
    raise CheckpointError(f"{folder} is a folder of the hub's cache, and has {len(found)} snapshots: give one of them")


def datasets_of(folder: Path) -> list[str]:
    """What the model was trained on, as the field `datasets` of its card says. Empty without a readable card."""
    found: object = None
    if (card := folder / "README.md").is_file():
        from huggingface_hub import ModelCard  # slow to import, and rarely needed

        with suppress(Exception):  # cards are written by hand, and their YAML fails in many ways
            found = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict().get("datasets")
    names = [found] if isinstance(found, str) else found
    return [str(name) for name in names] if isinstance(names, list) else []


def reachable(url: str) -> bool:
    """Whether the host of a URL accepts connections. True with a proxy, which answers for the host."""
    if getproxies():
        return True
    where, answers = urlsplit(url), Queue[bool]()

    def knock() -> None:
        try:
            port = where.port or (443 if where.scheme == "https" else 80)
            socket.create_connection((where.hostname or "", port), timeout=PATIENCE).close()
            answers.put(True)
        except OSError:
            answers.put(False)

    Thread(target=knock, daemon=True).start()  # the lookup of an address has no timeout
    try:
        return answers.get(timeout=PATIENCE)
    except Empty:
        return False
