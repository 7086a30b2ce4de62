"""A pipeline from the command line's overrides, for the benchmarks that run any model and recipe."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dinfer.cli import conf
from dinfer.cli.names import check


def configured(overrides: list[str]) -> dict[str, Any]:
    """The configuration that `dinfer` makes of the overrides. Raises ValueError for those it does not know."""
    check(overrides, conf.Schema(conf.PRIMARY), multirun=False)
    conf.publish_components()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf.folder())):
        config = compose(conf.PRIMARY, overrides=overrides)
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in values.items()}  # type: ignore[union-attr]
