"""Families whose drafts may take an adapter that decoded tokens do not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dinfer.core.layers.transformer import Transformer
from dinfer.core.models._family import HubFamily
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.core.registry import option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.gated import GatedTransformer, add_adapter


@dataclass(frozen=True, kw_only=True)
class GatedFamily(HubFamily):
    """A family whose drafts may take an adapter that its tokens do not."""

    draft_adapter: str | None = option(None, "hub name or folder of a PEFT LoRA adapter that drafting rows alone take")

    @property
    def template(self) -> str | None:
        return self.draft_adapter or self.adapter

    def network(self, spec: ModelSpec) -> Transformer:
        return GatedTransformer(spec)

    def finished(self, network: Any, folder: Path, rank: Rank = WHOLE) -> Any:
        if self.draft_adapter is not None:
            add_adapter(network, self.draft_adapter, self.weights(network.spec))
        return network
