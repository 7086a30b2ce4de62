"""How the engine runs, whatever the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

COMPILE = ("none", "default", "max-autotune")
KV = ("model", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Settings of an engine."""

    rows: int = 32  # requests in flight
    max_length: int | None = None  # make room for `rows` requests of so many positions at once; None: as they come
    page: int = 16  # positions per page of keys and values
    pages: int | None = None  # pages in all; None: enough for as many requests as run at a time
    positions: int = 8192  # that one step computes at most; longer prompts are prefilled in pieces
    settle: bool = False  # in large batches, rows take a narrow pass more to enter a block: faster, counts in NFE
    gather: bool = False  # prefills wait for others to share a step with: more throughput, later first blocks
    share: bool = False  # prompts that begin alike share keys (cache=block): faster, counts in NFE
    graphs: bool = False  # run each step as a CUDA graph
    kv: Literal["model", "fp8"] = "model"  # keys and values in the model's dtype, or in float8: half of 16 bits
    compile: Literal["none", "default", "max-autotune"] = "none"  # torch.compile for the body of the model

    def __post_init__(self) -> None:
        for name in ("rows", "max_length", "page", "pages", "positions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"runtime.{name}={value} must be at least 1")
        if self.kv not in KV:
            raise ValueError(f"runtime.kv={self.kv!r} must be one of {', '.join(KV)}")
        if self.compile not in COMPILE:
            raise ValueError(f"runtime.compile={self.compile!r} must be one of {', '.join(COMPILE)}")


def compiled(model: Any, mode: str) -> Any:
    """The model with its body compiled; ValueError for one that has no way to."""
    if not hasattr(model, "compiled"):
        raise ValueError(
            f"runtime.compile={mode}: the model {type(model).__name__} has no method `compiled`. Use "
            "runtime.compile=none."
        )
    return model.compiled(mode)
