"""serves models over HTTP, as OpenAI's API does, and shows a page

usage: dinfer serve [model=NAME] [port=8000] [overrides ...]

Clients of OpenAI's API work as they are: http://127.0.0.1:8000/v1. The address itself is a page to chat with. Needs
fastapi and uvicorn: pip install 'dinfer[serve]'. docs/serving.md says how to talk to it, and how to keep it safe.

Examples:
  dinfer serve model=tiny port=8000 runtime.rows=64
  dinfer serve model=llada2_mini 'recipes=[careful]'      # two models for clients: llada2_mini, llada2_mini:careful
  DINFER_KEY=... dinfer serve host=0.0.0.0 api_key=env:DINFER_KEY
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_type_hints

from dinfer.cli import conf
from dinfer.cli.application import launch
from dinfer.cli.arguments import Parser, configured
from dinfer.cli.recipe import pipeline, setting
from dinfer.cli.terminal import say
from dinfer.core.registry import typed

if TYPE_CHECKING:
    from dinfer.pipeline import Pipeline
    from dinfer.serving.served import Catalogue
    from dinfer.serving.settings import Settings


def arguments(parser: Parser) -> None:
    configured(parser)


def run(args: Namespace) -> None:
    """Serves until a signal comes."""
    if args.multirun:
        raise ValueError("-m starts one server after the other: start each with its own port= instead")
    launch(args, serve)


def serve(config: dict[str, Any], text: str | None) -> None:
    """Loads the model with its recipes and serves them."""
    needed("dinfer serve")
    settings = settings_of(config)
    settings.keys()  # raises where there are none
    others = recipes(config, "serve")
    from dinfer.serving.log import log_as_json
    from dinfer.serving.run import listen, serve, tuned
    from dinfer.serving.server import Server

    with listen(settings) as socket:
        server = Server(served(config, others, fitted(pipeline(config))), settings)
        log_as_json()
        with tuned():
            serve(server, socket, announced(server.catalogue))


def needed(command: str) -> None:
    """Raises ValueError unless the packages of the extra `serve` are installed."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise ValueError(f"{command} needs {package}: pip install 'dinfer[serve]'")


def recipes(config: dict[str, Any], command: str) -> dict[str, dict[str, Any]]:
    """The configurations of the setting `recipes`, by name. Raises ValueError."""
    others = {name: conf.with_recipe(command, name) for name in setting(config, "recipes", tuple[str, ...])}
    for name, other in others.items():
        if other["model"] != config["model"]:
            raise ValueError(f"recipes: {name} is for another model: run that with a command of its own")
    return others


def announced(catalogue: Catalogue) -> Any:
    """Says where the server is."""
    names = ", ".join(model.name for model in catalogue)

    def ready(address: str) -> None:
        print(f"{names}: {address} (a page), {address}v1 (OpenAI's API), {address}docs")
        sys.stdout.flush()
        say("Ctrl-C ends it.")

    return ready


def fitted(pipe: Pipeline) -> Pipeline:
    """The pipeline with room for no longer canvases than its model has positions."""
    from dinfer.pipeline import Pipeline

    runtime, most = pipe.engine.runtime, pipe.model.spec.max_length
    if runtime.max_length is None or runtime.max_length <= most:
        return pipe
    return Pipeline(pipe.recipe, pipe.tokenizer, replace(runtime, max_length=most))


def served(config: dict[str, Any], others: dict[str, dict[str, Any]], pipe: Pipeline) -> Catalogue:
    """The model, and beside it its other recipes."""
    from dinfer.core.recipe import compose
    from dinfer.serving.served import catalogue

    name = setting(config, "name", str | None) or conf.chosen("model")
    if not name or ":" in name:
        raise ValueError(f"name={name!r} must be a word without a colon, which divides the model from the recipe")
    recipes = {name: pipe.recipe}
    for preset, other in others.items():
        parts = {kind: other[kind] for kind in conf.GROUPS if kind != "model"}
        recipes[f"{name}:{preset}"] = compose(pipe.model, **parts)
    return catalogue(pipe, recipes, max_new_tokens=setting(config, "max_new_tokens", int), created=int(time.time()))


def settings_of(config: dict[str, Any]) -> Settings:
    """The settings of the server. Raises ValueError."""
    from dinfer.serving.settings import Settings

    hints = get_type_hints(Settings)
    return Settings(**typed(hints, {name: config[name] for name in hints}))
