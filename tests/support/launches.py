"""Which Triton kernels a step launches, and whether they compile for a card that is not there."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction  # noqa: E402 (only where it is)
from triton.experimental.gluon.nvidia import hopper  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

HOPPER = 90
TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@contextmanager
def recorded_launches(monkeypatch: Any) -> Iterator[set[str]]:
    """Every kernel that is launched is noted as JSON, and does nothing. Tensors may be on any device."""
    from triton.runtime.interpreter import InterpretedFunction

    launches: set[str] = set()

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bound = inspect.signature(self.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in self.arg_names})
        bound.apply_defaults()
        early = {name: True for name in ("EARLY", "ASM") if name in self.arg_names}
        types, fixed = {}, {}
        for name, value in (bound.arguments | early).items():
            annotated = "constexpr" in str(self.fn.__annotations__.get(name, ""))
            if annotated or value is None or (isinstance(value, int) and value == 1):  # as Triton specialises
                types[name], fixed[name] = "constexpr", plain(value)
            else:
                types[name] = type_of(value)
        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        launches.add(json.dumps([self.fn.__module__, self.fn.__name__, types, fixed, options], sort_keys=True))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", note)
        patch.setattr(GluonJITFunction, "run", note)  # the interpreter does not run Gluon
        for name, module in [*sys.modules.items()]:
            if name.startswith("dinfer.") and "use_triton" in vars(module):
                patch.setattr(module, "use_triton", lambda tensor, group, head_dim=16: head_dim >= 16)
            for able in ("on_hopper", "multiplies_integers"):
                if name.startswith("dinfer.") and able in vars(module):
                    patch.setattr(module, able, lambda tensor: True)
        yield launches


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{[*value.block_shape]}>"
    if isinstance(value, hopper.TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{[*value.block_shape]},{value.layout!r}>"
    if isinstance(value, float):
        return "fp32"
    return "i1" if isinstance(value, bool) else "i32" if -(2**31) <= value < 2**31 else "i64"


def plain(value: Any) -> Any:
    """A constant as JSON. Kernels may be given other functions and types as constants."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, triton.language.dtype):
        return {"dtype": str(value)}
    if isinstance(value, tuple) or is_dataclass(value):
        kind = type(value)
        return {"made": [kind.__module__, kind.__name__, {name: getattr(value, name) for name in kind.__annotations__}]}
    return {"kernel": [value.fn.__module__, value.fn.__name__]}


def failures(launches: set[str], capability: int = HOPPER) -> list[str]:
    """What does not compile for such a card, with the compiler's words. In a process whose Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(capability)], input="\n".join(sorted(launches)),
        env=environment | {"PYTHONPATH": path()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def path() -> str:
    return os.pathsep.join(sys.path)


def main() -> None:
    """Compiles the launches of stdin. Prints what failed as JSON."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def meant(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "dtype" in value:
            return triton.language.str_to_ty("*" + value["dtype"], None).element_ty
        module, name, *given = value["made" if "made" in value else "kernel"]
        found = getattr(importlib.import_module(module), name)
        return found(**given[0]) if given else found

    failed, capability = [], int(sys.argv[1])
    for line in sys.stdin.read().splitlines():
        module, name, types, fixed, options = json.loads(line)
        fixed |= {"EARLY": capability >= HOPPER} if "EARLY" in fixed else {}
        kernel = getattr(importlib.import_module(module), name)
        signature = {argument: types[argument] for argument in kernel.arg_names}
        source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
            kernel, signature, {argument: meant(value) for argument, value in fixed.items()}
        )
        try:
            triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        except Exception as error:
            failed.append(f"{module}.{name} {fixed}: {error}")
    print(json.dumps(failed))


if __name__ == "__main__":
    main()
