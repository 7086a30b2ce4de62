"""shows every registered component with its options

usage: dinfer list [model] [iteration] [decoder] [cache] [sampling]

For each component: what it does, its options with their defaults, and the paper. An option marked * may be set by
every request for itself (`options={"threshold": 0.8}` in the library); all are set by `decoder.threshold=0.8` here.
"""

from argparse import Namespace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dinfer.cli import conf
from dinfer.cli.terminal import show
from dinfer.core.registry import Registry, unknown

ROLES = {
    "model": "the network, loaded from a Hugging Face folder or hub name",
    "iteration": "how the canvas is swept, and what the model is fed at masks",
    "decoder": "which positions are committed at a step, and to what",
    "cache": "which keys and values are recomputed, seen and refreshed",
    "sampling": "which token a position is offered: the most likely, or one that is drawn",
}

NAMES = 18  # columns for names, so that descriptions stand below each other


def run(args: Namespace) -> None:
    """Prints the registries asked for, or all of them."""
    for kind in args.words:
        if kind not in conf.GROUPS:
            raise unknown("registry", kind, list(conf.GROUPS))
    listed = [listing(conf.GROUPS[kind]) for kind in args.words or conf.GROUPS]
    show(*listed, Text("* may differ from request to request", "bright_black"))


def listing(registry: Registry) -> RenderableType:
    """A registry with all its components, and what else may be chosen."""
    title = Text.assemble((registry.kind, "bold magenta"), f": {ROLES[registry.kind]}")
    parts = [Padding(component(registry, name), (0, 0, 1, 2), expand=False) for name in registry.names()]
    extra = [name for name in conf.choices(registry.kind) if name not in registry.names()]
    if extra:
        parts.append(Padding(Text(f"presets: {', '.join(extra)}"), (0, 0, 1, 2), expand=False))
    return Group(title, *parts)


def component(registry: Registry, name: str) -> RenderableType:
    """One component: summary, paper, options."""
    described = registry.describe(name)
    head = Table.grid(padding=(0, 2))
    head.add_column(min_width=NAMES + 2, no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row(Text(name, "bold cyan"), Text(described.summary))
    if described.paper:
        head.add_row("", Text(described.paper, "bright_black"))
    options = Table.grid(padding=(0, 2))
    options.add_column(min_width=NAMES, no_wrap=True)
    options.add_column(min_width=8, max_width=26, overflow="fold")
    options.add_column(overflow="fold")
    for info in described.options:
        options.add_row(
            Text(f"{info.name}{' *' if info.per_request else ''}", "green"), shown(info.default), Text(info.help)
        )
    return Group(head, Padding(options, (0, 0, 0, 2), expand=False))


def shown(value: object) -> str:
    """A default as it is written in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
