"""Families whose checkpoints have a vision tower."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from dinfer.core.models._family import HubCheckpoint
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.core.registry import option
from dinfer.core.terms.spec import ModelSpec
from dinfer.families.images.eyes import Eyes, bytes_of, eyes_of


@dataclass(frozen=True, kw_only=True)
class SeeingFamily(HubCheckpoint):
    """A family whose checkpoints have a vision tower. `unused` names its tensors, which the network leaves to it."""

    image_tokens: int = option(
        2240, "positions of a request that images may take, for which memory is kept; 0: no vision tower is loaded",
        least=0,
    )  # fmt: skip

    eyes: ClassVar[type[Eyes]]  # what sees for its networks

    def finished(self, network: Any, folder: Path, rank: Rank = WHOLE) -> Any:
        blind = "model.image_tokens=0 loads no vision tower: raise it, or send text alone"
        network.eyes = eyes_of(self.eyes, folder, network, self.image_tokens, rank) if self.image_tokens else blind
        network.placeholder = network.eyes.token if isinstance(network.eyes, Eyes) else None
        return network

    def tower_bytes(self, folder: Path, dtype: torch.dtype) -> int:
        """Bytes of the vision tower beside a network of this dtype. Reads no weight."""
        return bytes_of(folder, self.unused, dtype) if self.image_tokens else 0


def check_tower(family: Any, folder: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError for a vision tower that does not load. Reads no weight."""
    if isinstance(family, SeeingFamily) and family.image_tokens:
        network = SimpleNamespace(spec=spec, device=torch.device("cpu"), dtype=torch.float32)
        eyes_of(family.eyes, folder, network, family.image_tokens, Rank(1, 2))  # which reads none
