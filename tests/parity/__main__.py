"""`python -m tests.parity DIR [--only PATTERN ...] [--device cuda] [--verbose]`

Exit status: 0 if nothing failed, 1 if something did, 2 if there was nothing to check or every case was skipped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.parity.check import Result, UsageError, check


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the check and prints what it finds; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity",
        description="Checks dinfer against recorded runs of the reference implementations.",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of goldens, such as tests/goldens")
    parser.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="PATTERN",
        help="check only these cases, such as 'models/llada*' or decoders/dinfer_threshold/c003",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where everything runs; default: cpu")
    parser.add_argument("--verbose", action="store_true", help="a line for every case, not only for failures")
    args = parser.parse_args(argv)

    def tell(result: Result) -> None:
        if args.verbose or result.outcome == "failed":
            print(f"{result.outcome.upper():<7} {result.id}: {result.remark}", flush=True)

    try:
        report = check(args.dir, args.only, tell, torch.device(args.device))
    except UsageError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    skips = report.skips()
    if skips:
        print("skipped:")
    for reason, count in skips:
        print(f"  {reason}: {count}")
    print(report.summary)
    if not report.count("passed") + report.count("failed"):
        print(f"{parser.prog}: error: every case was skipped, so nothing was checked", file=sys.stderr)
        return 2
    return 1 if report.count("failed") else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny, and threads would only wait for each other
    sys.exit(main())
