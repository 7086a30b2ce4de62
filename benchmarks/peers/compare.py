"""The published dInfer or Diffulex and this project on the same work, on one card, one run after another.

    python -m benchmarks.peers.compare --peer FOLDER --out benchmarks/results/peers-h200.json
    python -m benchmarks.peers.compare --diffulex FOLDER --out benchmarks/results/diffulex-h200.json
    python -m benchmarks.peers.compare --peer FOLDER --out /tmp/dry.json --dry-run       # tiny shapes on a CPU

FOLDER holds a peer's package (README.md beside this file says how to bring it). Each run is a process with compile
caches of its own, so that its first call is that of a fresh machine; with `--caches FOLDER` runs of a side share them,
and only its first run compiles all. Runs are added to the file as they end, one that fails costs no other, and those
that the file has are left as they are: its commits, versions and hardware must be those of now. `--only` runs some, in
that order; `--together` others, which warm up beside each other, so that their first calls take longer, and are timed
one at a time. Two cards write a file each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance, save
from benchmarks.shapes import SHAPES, SMALLER

ROOT = Path(__file__).parents[2]
BLOCKS = {  # shapes with keys that are final once a block is finished, and what is asked of both sides
    "llada": ("llada-8b", "--cache block --attention-block 32"),
    "sdar-4b": ("sdar-4b", "--cache block --attention-block 4 --block 4 --rate 2 --prompt 512"),
    "sdar-8b": ("sdar-8b", "--cache block --attention-block 4 --block 4 --rate 2 --prompt 512"),
}
DENSE: dict[str, tuple[str, list[str]]] = {  # LLaDA-8B: a side, and what is asked of it
    "peer-eager": ("published", ["--eager"]),
    "peer-dual": ("published", []),
    "ours-dual": ("ours", []),
    "ours-fp8": ("ours", ["--quantize", "fp8"]),
    "ours-int4": ("ours", ["--quantize", "int4"]),
    "peer-vicinity": ("published", ["--cache", "vicinity"]),
    "ours-vicinity": ("ours", ["--cache", "vicinity"]),
    "peer-none": ("published", ["--cache", "none"]),
    "ours-none": ("ours", ["--cache", "none"]),
    "peer-batch8": ("published", ["--batch", "8"]),
    "ours-batch8": ("ours", ["--batch", "8"]),
}
RUNS = {name: (side, "llada-8b", options) for name, (side, options) in DENSE.items()} | {
    f"{side}-{name}-batch{batch}": (side, shape, [*options.split(), "--batch", str(batch)])
    for batch in (1, 16)
    for name, (shape, options) in BLOCKS.items()
    for side in ("diffulex", "ours")
}


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="folder that holds the published dInfer, dinfer/")
    parser.add_argument("--peer-commit", default="fce4e328")
    parser.add_argument("--diffulex", type=Path, help="folder that holds diffulex/ and diffulex_kernel/")
    parser.add_argument("--diffulex-commit", default="184ba97")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=RUNS, help="default: all of the peers whose folders are given")
    parser.add_argument("--together", nargs="*", choices=RUNS, default=[], help="after the others")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a run may take")
    parser.add_argument("--repeats", type=int, default=3, help="timed generations of a run")
    parser.add_argument("--caches", type=Path, help="folder of compiled kernels that the runs of a side share")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(args)
    there = {"published": given.peer, "diffulex": given.diffulex, "ours": ROOT}
    blocks = [name for name in RUNS if name not in DENSE]
    wanted = [*(DENSE if given.peer else ()), *(blocks if given.diffulex else ())]
    given.only = [name for name in wanted if name not in given.together] if given.only is None else given.only
    for name in (*given.only, *given.together):
        if there[RUNS[name][0]] is None:
            parser.error(f"{name} needs --{'peer' if RUNS[name][0] == 'published' else 'diffulex'} FOLDER")
    if not given.only and not given.together:
        parser.error("nothing to run: give --peer FOLDER, --diffulex FOLDER or --only")
    return given


def run(name: str, given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """One run in a process of its own. Raises CalledProcessError, TimeoutExpired."""
    side, shape, options = RUNS[name]
    out, config = scratch / f"{name}.json", scratch / "config.json"
    config.write_text(json.dumps(SHAPES[SMALLER[shape] if given.dry_run else shape]))
    # The published dInfer is called as ours: the first folder wins, and the working directory comes before all.
    folders = {
        "published": [str(given.peer.resolve()), str(ROOT)] if given.peer else [],
        "diffulex": [str(ROOT), str(given.diffulex.resolve())] if given.diffulex else [],
        "ours": [str(ROOT)],
    }[side]
    own = given.caches.resolve() / side if given.caches else scratch / name
    caches = {f"{kind}_CACHE_DIR": str(own / kind) for kind in ("TRITON", "TORCHINDUCTOR")}
    caches["PEERS_TOGETHER"] = " ".join(given.together) if name in given.together else ""
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    dry = ["--device", "cpu", "--eager", "--prompt", "32", "--new", "64"] if given.dry_run else []
    line = [sys.executable, "-m", f"benchmarks.peers.{side}", "--config", str(config), "--out", str(out)]
    line += ["--repeats", str(given.repeats)]
    try:
        subprocess.run([*line, *options, *dry], cwd=folders[0], env=environment, check=True, timeout=given.limit)
    finally:
        out.with_suffix(".warm").touch()  # nobody waits for a run that failed
    return {"who": "ours" if side == "ours" else "peer"} | json.loads(out.read_text())


def begun(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The report that `out` holds, or a new one. Raises ValueError if it is not of the same code and machine."""
    found = json.loads(out.read_text()) if out.is_file() else {**about, "runs": {}}
    for name in about.keys() - {"command", "date"}:
        if found.get(name) != about[name]:
            raise ValueError(f"--out {out} has {name} {found.get(name)}, now it is {about[name]}: name another file")
    return dict(found)


def main(args: list[str] | None = None) -> None:
    import torch

    given = arguments(args)
    about = provenance(torch.device("cpu" if given.dry_run else "cuda"))
    about |= {"transformers": version("transformers")}
    about |= {"peer_commit": given.peer_commit} if given.peer else {}
    about |= {"diffulex_commit": given.diffulex_commit} if given.diffulex else {}
    found = begun(given.out, about)
    failed = []

    def add(name: str) -> None:
        try:
            row = run(name, given, Path(scratch))
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            failed.append(name)
            return print(f"{name}: {error}", flush=True)
        found["runs"][name] = row
        save(found, given.out)
        print(f"{name}: {row['ms_per_forward']:.2f} ms a forward, first call {row['warm_up_s']:.1f} s", flush=True)

    with tempfile.TemporaryDirectory(prefix="dinfer-peers-") as scratch:
        for name in [name for name in given.only if name not in found["runs"]]:
            add(name)
        given.together = [name for name in given.together if name not in found["runs"]]
        with ThreadPoolExecutor(len(given.together) or 1) as pool:
            list(pool.map(add, given.together))
    if failed:
        sys.exit(f"benchmarks.peers.compare: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
