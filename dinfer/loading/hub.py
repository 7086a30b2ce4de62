"""Downloads from the Hugging Face hub, whose errors name the model and say what to do."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from dinfer.loading.safetensors_io import CheckpointError

PATIENCE = 2.0  # seconds for a first connection; the hub's client waits a minute where packets are swallowed


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder with a model's files, downloaded or from the cache. Raises CheckpointError if it cannot be had."""
    from huggingface_hub import constants, errors, snapshot_download  # slow to import, and not needed for folders

    offline = constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)
    page = f"{constants.ENDPOINT}/{name}"
    try:
        found = snapshot_download(name, revision=revision, allow_patterns=[*patterns], local_files_only=offline)
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{name} is gated: accept its terms at {page} and log in with `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no {page}: check the name; private models need `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision={revision!r}: see {page}/commits") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{name!r} is no hub name: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        why = f"{constants.ENDPOINT} cannot be reached" if offline else str(error).splitlines()[0]
        why = "HF_HUB_OFFLINE is set: unset it" if constants.HF_HUB_OFFLINE else f"{why}: connect to the network"
        raise CheckpointError(
            f"{name} is not in {constants.HF_HUB_CACHE}, and {why}; or run `hf download {name}` elsewhere, bring the "
            "folder here and give it as model.checkpoint=FOLDER"
        ) from error
    except errors.HfHubHTTPError as error:
        raise CheckpointError(f"{name} cannot be downloaded from {constants.ENDPOINT}: {error}") from error
    return Path(found)


def reachable(url: str) -> bool:
    """Whether the host of a URL takes connections; with a proxy, that is for the proxy to say."""
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

    Thread(target=knock, daemon=True).start()  # looking up a host's address knows no timeout
    try:
        return answers.get(timeout=PATIENCE)
    except Empty:
        return False
