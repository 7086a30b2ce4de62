"""The load on parts that replicas share, and the capacity of one such part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def shared(row: dict[str, Any], front: dict[str, Any], ray: dict[str, Any]) -> dict[str, Any]:
    """The load on each part of a simulated row, in cores of a process that has one, and in bits a second.

    `front`: a file of benchmarks.capacity.front_end. `ray`: a file of benchmarks.capacity.ray_serve. `event_loop` is
    that of one replica. `proxy` is one proxy for all requests, and `cards_of_proxy` the number of cards that fill it.
    """
    cards, replicas = row["cards"], row["replicas"]
    loop, proxy, controller = front["front_end"], ray["proxy"], ray["controller"]
    requests, pieces, rounds = row["requests_per_s"], row["pieces_per_s"], row["rounds_per_s"]
    routed = requests * proxy["request"] + pieces * proxy["piece"]
    return {
        "event_loop": (requests * loop["request"] + pieces * loop["piece"] + rounds * loop["round"]) / replicas,
        "proxy": routed,
        "controller": controller["alone"] + max(controller["per_replica"], 0.0) * replicas,
        "bits_per_s": 8 * pieces * front["bytes_per_piece"],
        "cards_of_proxy": cards / routed,
        "cards_of_proxy_unstreamed": cards / (requests * proxy["request"]),
    }


def read(path: Path, *names: str) -> dict[str, Any]:
    """Reads a file that must have these parts. Raises ValueError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path} has no {missing[0]}: give the file that its script writes")
    return found
