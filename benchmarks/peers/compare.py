"""The published dInfer and this project on the same work, on one card, one run after another.

    python -m benchmarks.peers.compare --peer FOLDER --out benchmarks/results/peers-h200.json
    python -m benchmarks.peers.compare --peer FOLDER --out /tmp/dry.json --dry-run       # tiny shapes on a CPU

FOLDER holds the peer's package (README.md beside this file says how to bring it). Each run is a process with compile
caches of its own, so that its first call is that of a fresh machine. Runs are added to the file as they end: `--only`
runs some, and a file begun before is gone on with.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance, save
from benchmarks.shapes import SHAPES

ROOT = Path(__file__).parents[2]
RUNS = {  # a side, and what is asked of it
    "peer-eager": ("published", ["--eager"]),
    "peer-dual": ("published", []),
    "ours-dual": ("ours", []),
    "ours-fp8": ("ours", ["--quantize", "fp8"]),
    "peer-vicinity": ("published", ["--cache", "vicinity"]),
    "ours-vicinity": ("ours", ["--cache", "vicinity"]),
    "peer-none": ("published", ["--cache", "none"]),
    "ours-none": ("ours", ["--cache", "none"]),
    "peer-batch8": ("published", ["--batch", "8"]),
    "ours-batch8": ("ours", ["--batch", "8"]),
}


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder that holds the peer's package, dinfer/")
    parser.add_argument("--peer-commit", default="fce4e328")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a run may take")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(args)


def run(name: str, given: argparse.Namespace, config: Path, scratch: Path) -> dict[str, Any]:
    """One run in a process of its own. Raises CalledProcessError, TimeoutExpired."""
    side, options = RUNS[name]
    out = scratch / f"{name}.json"
    # Both packages are called dinfer: the first folder wins, and the working directory comes before all.
    folders = [str(given.peer.resolve()), str(ROOT)] if side == "published" else [str(ROOT)]
    caches = {f"{kind}_CACHE_DIR": str(scratch / name / kind) for kind in ("TRITON", "TORCHINDUCTOR")}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    dry = ["--device", "cpu", "--eager", "--prompt", "32", "--new", "64"] if given.dry_run else []
    line = [sys.executable, "-m", f"benchmarks.peers.{side}", "--config", str(config), "--out", str(out)]
    subprocess.run([*line, *options, *dry], cwd=folders[0], env=environment, check=True, timeout=given.limit)
    return {"who": "peer" if side == "published" else "ours"} | json.loads(out.read_text())


def main(args: list[str] | None = None) -> None:
    import torch

    given = arguments(args)
    about = provenance(torch.device("cpu" if given.dry_run else "cuda"))
    about |= {"transformers": version("transformers"), "peer_commit": given.peer_commit}
    found = json.loads(given.out.read_text()) if given.out.is_file() else {**about, "runs": {}}
    with tempfile.TemporaryDirectory(prefix="dinfer-peers-") as scratch:
        config = Path(scratch, "config.json")
        config.write_text(json.dumps(SHAPES["small" if given.dry_run else "llada-8b"]))
        for name in given.only:
            found["runs"][name] = run(name, given, config, Path(scratch))
            save(found, given.out)
            row = found["runs"][name]
            print(f"{name}: {row['ms_per_forward']:.2f} ms a forward, first call {row['warm_up_s']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
