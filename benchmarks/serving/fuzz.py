"""schemathesis sends a server requests that its OpenAPI schema allows and forbids: none may get 5xx, none may hang.

pip install schemathesis        # in a new environment, with dinfer
python -m benchmarks.serving.fuzz --cases 20000 --out benchmarks/results/serving-fuzz.json
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance, save
from benchmarks.serving.process import serving

TIMEOUT = 60  # seconds that an answer may take: a longer one counts as a hang
# Short answers, so that the time goes into requests.
SERVER = ("device=cpu", "max_new_tokens=4", "runtime.rows=16", "runtime.max_length=128")


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the names of this server, since otherwise every request would name an unknown model or option."""
    kinds = schema["components"]["schemas"]
    for kind in kinds.values():
        if "model" in kind.get("properties", {}):
            kind["properties"]["model"] = {"type": "string", "enum": ["tiny"]}
    own = kinds["Own"]
    own["properties"]["threshold"] = {"type": "number"}
    own["properties"]["decoder"] = {"type": "string", "enum": ["threshold"]}
    own["additionalProperties"] = False
    # No deadline is short, since a passed deadline is answered 504, as documented.
    own["properties"]["deadline"] = {"anyOf": [{"type": "number", "minimum": TIMEOUT}, {"type": "null"}]}
    return schema


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000, help="that are wanted, of all operations together")
    parser.add_argument("--workers", type=int, default=4, help="operations that are tried at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which("schemathesis")
    if program is None:
        raise SystemExit("schemathesis is not installed here")
    with tempfile.TemporaryDirectory() as folder, serving(*SERVER, log=f"{folder}/server.log") as server:
        with urllib.request.urlopen(f"{server.url}openapi.json") as response:
            schema = narrowed(json.load(response))
        operations = [operation for path in schema["paths"].values() for operation in path.values()]
        asking = sum("requestBody" in operation for operation in operations)  # there is one case of each other one
        Path(f"{folder}/openapi.json").write_text(json.dumps(schema))
        began = time.perf_counter()
        found = subprocess.run(
            [
                program, "run", "openapi.json", "--url", server.url, "--checks", "not_a_server_error", "--max-examples",
                str(args.cases // asking), "--workers", str(args.workers), "--seed", str(args.seed),
                "--request-timeout", str(TIMEOUT), "--continue-on-failure", "--generation-database", "none",
                "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing", "--no-color",
            ],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        with urllib.request.urlopen(f"{server.url}health") as response:
            healthy = json.load(response) == {"status": "ok"}
        with urllib.request.urlopen(f"{server.url}metrics") as response:
            metrics = response.read().decode()
        log = Path(f"{folder}/server.log").read_text().splitlines()
    statuses: dict[str, int] = {}
    for line in log:
        if (status := re.search(r'"status": (\d+)', line)) is not None:
            statuses[status[1]] = statuses.get(status[1], 0) + 1
    summary = found.stdout[found.stdout.rfind("SUMMARY") :]
    cases = re.search(r"(\d[\d,]*) generated", summary)
    document = {
        **provenance(torch.device("cpu")),
        "schemathesis": version("schemathesis"),
        "server": list(SERVER),
        "operations": len(operations),
        "cases": int(cases[1].replace(",", "")) if cases else None,
        "seconds": round(seconds, 1),
        "exit_status": found.returncode,
        "requests_by_status": dict(sorted(statuses.items())),
        "server_errors": sum(count for status, count in statuses.items() if status.startswith("5")),
        "timeouts": len(re.findall(r"read timed out|request timed out", found.stdout, re.IGNORECASE)),
        "healthy_after": healthy,
        "idle_after": bool(re.search(r"^dinfer_requests_in_flight 0\.0$", metrics, re.MULTILINE)),
        "summary": [line.strip() for line in summary.splitlines() if line.strip()],
    }
    print(json.dumps(document, indent=1))
    if found.returncode:
        print(found.stdout, file=sys.stderr)
        print(*(line for line in log if '"level": "error"' in line), sep="\n", file=sys.stderr)
    save(document, args.out)


if __name__ == "__main__":
    main()
