"""serves models over HTTP, as OpenAI's API does, and shows a page

usage: dinfer serve [model=NAME] [port=8000] [overrides ...]

Clients of OpenAI's API work as they are, at http://127.0.0.1:8000/v1. http://127.0.0.1:8000 is a page for chats. Needs
fastapi and uvicorn: pip install 'dinfer[serve]'. docs/serving.md says how to use the server and how to keep it safe.

Examples:
  dinfer serve model=tiny port=8000 runtime.rows=64
  dinfer serve model=llada2_mini 'recipes=[careful]'      # two models for clients: llada2_mini, llada2_mini:careful
  DINFER_KEY=... dinfer serve host=0.0.0.0 api_key=env:DINFER_KEY
  dinfer serve model=llada2_mini replicas=8               # on Ray: pip install 'dinfer[ray]', docs/scaling/replicas.md
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from hydra.core.hydra_config import HydraConfig

from dinfer.cli import conf
from dinfer.cli.application import launch
from dinfer.cli.conf import check_ahead, counted, need, of_recipe, pipeline, ranks_of, runtime_of, setting
from dinfer.cli.terminal import FAILED, check_interrupted, fail
from dinfer.core.loading.files import locate
from dinfer.core.provided import needed as provider
from dinfer.core.registry import typed

if TYPE_CHECKING:
    from dinfer.serving.server import Server
    from dinfer.serving.settings import Settings


def run(args: Namespace) -> None:
    """Serves until a signal comes."""
    if args.multirun:
        raise ValueError("-m starts one server after the other: start each with its own port= instead")
    launch(args, serve)


def serve(config: dict[str, Any]) -> None:
    """Loads the model with its recipes and serves them."""
    needed("dinfer serve")
    from dinfer.serving.settings import Settings, listen

    hints = get_type_hints(Settings)
    settings = Settings(**typed(hints, {name: config[name] for name in hints if name in config}))
    settings.keys()  # raises where there are none
    others, config = recipes(config, "serve"), config | {"name": name_of(config)}
    if setting(config, "replicas", int | None) is not None:
        if settings.rollouts:
            raise ValueError("rollouts=true is of one process, whose weights a trainer replaces: leave out replicas")
        if settings.adapters is not None:
            raise ValueError("adapters= are of one process, where clients load more: leave out replicas")
        return serve_replicas(config, others, settings)
    if config["autoscaling"] is not None:
        raise ValueError(f"autoscaling={config['autoscaling']} is for replicas: give replicas= too, the least of them")
    with listen(settings) as socket:
        from dinfer.serving.guard import log_as_json

        log_as_json()  # what loading warns of too
        check(config, others, settings)
        server = made(config, others, settings)
        from dinfer.serving.run import serve, tuned

        check_interrupted()
        with tuned():
            serve(server, socket, partial(announce, [*server.catalogue]))
    return None


def serve_replicas(config: dict[str, Any], others: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Deploys the same application on Ray Serve. Raises ValueError, before anything starts, for what has no room."""
    need("ray", "ray", "replicas= needs Ray")
    replicas = counted(config, "replicas")
    from dinfer.serving.settings import listen

    with listen(settings, shared=True) as socket:
        check(config, others, settings)
        autoscaling = setting(config, "autoscaling", dict | None)
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # read at the import: each request has a line of its own
        from dinfer.scale.ray.cluster import connect, device_of, placed
        from dinfer.scale.ray.replicas import Plan, run
        from dinfer.serving.run import EngineFailed

        connect(setting(config, "ray", str), logs=True, private=not settings.insecure)
        device = device_of(setting(config, "device", str | None))
        replicas, resources = placed(replicas, ranks_of(config), device)
        rows = runtime_of(config, device).rows
        plan = Plan(replicas=replicas, rows=rows, resources=resources, autoscaling=autoscaling)
        names = [config["name"], *(f"{config['name']}:{preset}" for preset in others)]
        try:
            run(partial(made, config | {"device": device}, others), settings, plan, socket, partial(announce, names))
        except EngineFailed as error:
            fail(error, FAILED)


def check(config: dict[str, Any], others: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Raises ValueError for what cannot be loaded or served, before weights are read."""
    from dinfer.serving.settings import check_aliases

    check_aliases(settings.aliases or {}, [config["name"], *(f"{config['name']}:{preset}" for preset in others)])
    check_ahead(config, others)
    from dinfer.core.pipeline.inputs import named

    for name, path in (settings.adapters or {}).items():
        with named("adapters"):
            locate(path, needed=provider("adapters", f"adapters={name}", "formats").ADAPTER)


def made(config: dict[str, Any], others: dict[str, dict[str, Any]], settings: Settings) -> Server:
    """The server of one process: the model under its `name`, and beside it its other recipes.

    Ray calls it in the process of each replica.
    """
    if others and (memory := config["runtime"].get("memory")) is not None:
        raise ValueError(
            f"runtime.memory={memory} is for one recipe, and recipes={[*others]} may need an engine each: set "
            "runtime.pages, or serve them apart"
        )
    pipe = pipeline(config)
    from dinfer.core.pipeline import Pipeline
    from dinfer.core.recipe.recipe import compose

    runtime, most = pipe.engine.runtime, pipe.model.spec.max_length
    if runtime.max_length is not None and runtime.max_length > most:  # no longer canvases than the model has positions
        pipe = Pipeline(pipe.recipe, pipe.tokenizer, replace(runtime, max_length=most), pipe.origin)
    found = {config["name"]: pipe.recipe}
    for preset, other in others.items():
        with of_recipe(preset):
            found[f"{config['name']}:{preset}"] = compose(pipe.model, **other)
    from dinfer.core.pipeline.inputs import named
    from dinfer.serving.apis.adapters import load
    from dinfer.serving.served import catalogue, tell_memory, warm_up
    from dinfer.serving.server import Server  # while a compiler may be at the kernels of `pipe`

    new_tokens = setting(config, "max_new_tokens", int)
    server = Server(catalogue(pipe, found, max_new_tokens=new_tokens, created=int(time.time())), settings)
    for adapter, path in (settings.adapters or {}).items():
        with named("adapters"):
            load(server.catalogue, adapter, path)
    if settings.warm_up:
        warm_up(server.catalogue, settings.warm_up)
    tell_memory(server.catalogue)
    return server


def needed(command: str) -> None:
    """Raises ValueError unless the packages of the extra `serve` are installed."""
    for package in ("fastapi", "uvicorn", "httptools", "prometheus_client"):
        need(package, "serve", f"{command} needs {package}")


def recipes(config: dict[str, Any], command: str) -> dict[str, dict[str, Any]]:
    """The components of each recipe that the setting `recipes` names. Raises ValueError."""
    others: dict[str, dict[str, Any]] = {}
    for name in setting(config, "recipes", tuple[str, ...]):
        with of_recipe(name):
            other = conf.recomposed(command, [f"{conf.RECIPE}={name}"])
        if other["model"] != config["model"]:
            raise ValueError(f"recipes: {name} is for another model: run that with a command of its own")
        for key in other.keys() - {*conf.GROUPS}:
            if other[key] != config.get(key):
                raise ValueError(
                    f"recipes: {name} sets {key}, which all recipes of a {command} share: take it out of the preset, "
                    "and set it on the command line"
                )
        others[name] = {kind: other[kind] for kind in conf.GROUPS if kind != "model"}
    return others


def announce(names: list[str], address: str) -> None:
    """Says where the server is."""
    with suppress(OSError):  # a server goes on without a reader
        where = f"{address} (a page), {address}v1 (OpenAI's API), {address}docs"
        print(f"{', '.join(names)}: {where}\nCtrl-C ends it.", flush=True)  # stderr has lines of JSON alone


def name_of(config: dict[str, Any]) -> str:
    """The name by which clients ask for the model. Raises ValueError."""
    name = setting(config, "name", str | None) or str(HydraConfig.get().runtime.choices["model"])
    if ":" in name:
        raise ValueError(f"name={name!r} must be a word without a colon, which divides the model from the recipe")
    return name
