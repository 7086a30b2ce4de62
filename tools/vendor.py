"""Brings the libraries of the server's page from the npm registry: `dinfer/serving/page/vendor/vendor.json` names them.

`python -m tools.vendor` writes their files beside that note, and their SHA-256 into it. For a newer version, change its
number there first. The files are committed as they were published, so that the page works offline and without Node.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "dinfer" / "serving" / "page" / "vendor"
NOTE = FOLDER / "vendor.json"


def published(package: str, version: str, path: str) -> bytes:
    """A file of a package of the registry. Raises OSError without npm, CalledProcessError if it has no such version."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"{package}@{version}", "--pack-destination", folder, "--silent"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        (archive,) = Path(folder).iterdir()
        with tarfile.open(archive) as opened:
            member = opened.extractfile(f"package/{path}")
            assert member is not None, f"{package} {version} has no file {path}"
            return member.read()


def local(package: str, path: str) -> Path:
    """Where a file of a package lies here: each has a licence of its own."""
    name = path.rpartition("/")[2]
    return FOLDER / (name if "." in name else f"{package}.{name}")


def refresh() -> None:
    note = json.loads(NOTE.read_text())
    for one in note:
        for path in one["files"]:
            data = published(one["package"], one["version"], path)
            local(one["package"], path).write_bytes(data)
            one["files"][path] = hashlib.sha256(data).hexdigest()
    NOTE.write_text("[\n" + ",\n".join(f" {json.dumps(one)}" for one in note) + "\n]\n")


if __name__ == "__main__":
    refresh()
