"""The table of `benchmarks.peers` in docs/performance.md, from what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "results" / "peers-h200-5453251.json"
TITLES = {  # a row's title, and its run
    "dInfer, eager, dual cache": "peer-eager",
    "dInfer, torch.compile, dual cache": "peer-dual",
    "ours, dual cache": "ours-dual",
    "ours, dual cache, fp8": "ours-fp8",
    "dInfer, torch.compile, vicinity 16/16": "peer-vicinity",
    "ours, vicinity 16/16": "ours-vicinity",
    "dInfer, torch.compile, no cache": "peer-none",
    "ours, no cache": "ours-none",
    "dInfer, torch.compile, dual cache, batch 8": "peer-batch8",
    "ours, dual cache, batch 8": "ours-batch8",
}

SHOWN = {  # in the figure of the README
    "dInfer, torch.compile": "peer-dual",
    "ours": "ours-dual",
    "ours, fp8": "ours-fp8",
    "dInfer, torch.compile, batch 8": "peer-batch8",
    "ours, batch 8": "ours-batch8",
}


def measured() -> dict[str, Any]:
    """All runs, and what they ran on."""
    return dict(json.loads(FILE.read_text()))


def peers() -> str:
    """The published dInfer and ours on the same work: generations beside generations, steps beside steps."""
    report = measured()
    runs, some = report["runs"], report["runs"]["ours-dual"]
    together = [title for title, name in TITLES.items() if runs[name].get("together_with")]
    lines = [
        f"LLaDA-8B's shape with random bfloat16 weights, prompt {some['prompt']}, {some['new']} new tokens, blocks of "
        f"{some['block']}, {some['tokens_per_forward']:.0f} tokens a step on both sides: each computes its threshold "
        "rule and commits the leftmost masks. dInfer at commit "
        f"{report['peer_commit']}, ours at {report['commit']}, one {report['hardware']}, torch {report['torch']}, "
        f"transformers {report['transformers']}. A generation is the median of {len(some['all_s'])}, over its "
        "forwards. A window step is one forward of a block, a full pass one of the whole canvas. The first call "
        f"compiles. {len(together)} runs of dInfer compiled beside each other (marked *), so their first calls "
        "are longer than alone; they were timed one at a time.",
        "",
        "| run | ms a forward, generation | window step | full pass | tokens/s | forwards | first call |",
        "| --- |" + " --- |" * 6,
    ]
    for title, name in TITLES.items():
        run = runs[name]
        widths = {int(key.split()[-1]): found["median_ms"] for key, found in run["by_width"].items()}
        full = widths.pop(run["prompt"] + run["new"])
        window = " to ".join(f"{ms:.2f}" for ms in sorted(set(widths.values()))) or "-"
        lines.append(
            f"| {title} | {run['ms_per_forward']:.2f} | {window} | {full:.2f} | {run['tokens_per_s']:,.0f} "
            f"| {run['forwards']} | {run['warm_up_s']:.0f} s{' *' if title in together else ''} |"
        )
    return "\n".join(lines)
