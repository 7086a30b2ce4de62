"""From a composed configuration to a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_type_hints

from dinfer.cli.conf import GROUPS
from dinfer.core.registry import typed, unknown
from dinfer.loading.hub import SMALL, locate

if TYPE_CHECKING:
    from dinfer.engine.runtime import Runtime
    from dinfer.pipeline import Pipeline


def pipeline(config: dict[str, Any]) -> Pipeline:
    """Loads the model with the recipe of the configuration."""
    import torch

    from dinfer.pipeline import load

    parts = {kind: config[kind] for kind in GROUPS}
    device = setting(config, "device", str | None) or ("cuda" if torch.cuda.is_available() else "cpu")
    # Before the weights are read, so that a slip in a decoder's option is known at once.
    for kind, registry in GROUPS.items():
        registry.build(parts[kind])
    return load(
        parts.pop("model"),
        **parts,
        device=device,
        dtype=setting(config, "dtype", str | None),
        quantize=setting(config, "quantize", str | None),
        runtime=_runtime(config["runtime"], device),
    )


def located(config: dict[str, Any]) -> None:
    """Finds the description of the model's checkpoint. Raises CheckpointError if it cannot be had."""
    _, options = GROUPS["model"].check(config["model"])
    if checkpoint := options.get("checkpoint"):
        locate(checkpoint, options.get("revision"), wanted=SMALL)


def setting(config: dict[str, Any], name: str, hint: Any) -> Any:
    """A setting, ValueError if it is not of the type that is wanted."""
    return typed({name: hint}, {name: config[name]})[name]


def text_of(config: dict[str, Any], name: str, given: str | None) -> str | None:
    """The text on the command line, or else that of the setting `name`; ValueError for both, and for an empty one."""
    value = config[name]
    if given is not None and value is not None:
        raise ValueError(f"the {name} is given twice, as an argument and as {name}=")
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name}={value!r} must be a text: give it as an argument of its own")
    text = value if given is None else given
    if text is not None and not str(text).strip():
        raise ValueError(f"the {name} is empty")
    return None if text is None else str(text)


def _runtime(settings: Any, device: str) -> Runtime:
    if not isinstance(settings, dict):
        raise ValueError(f"runtime={settings!r} must be settings, such as runtime.rows=8")
    from dinfer.engine.runtime import Runtime

    names = list(Runtime.__dataclass_fields__)
    for name in settings:
        if name not in names:
            raise unknown("setting of runtime:", name, names)
    graphs = {"graphs": device.startswith("cuda")} if settings.get("graphs") is None else {}
    return Runtime(**typed(get_type_hints(Runtime), {**settings, **graphs}, prefix="runtime."))
