"""The contract of a model family."""

from abc import abstractmethod
from typing import Any, ClassVar

from dinfer.core.ranks.split import Placement
from dinfer.core.step.contracts import Component
from dinfer.core.terms.spec import ExpertLayout, ModelSpec


class ModelFamily(Component):
    """What the checkpoints of one family mean. Options say which one; `dinfer.core.loading.checkpoint` loads it."""

    kind = "model"
    harmless: ClassVar[frozenset[str]] = frozenset()  # fields of config.json that it need not read, see `Fields.unread`
    unused: ClassVar[tuple[str, ...]] = ()  # beginnings of the names of tensors that the network has no use for
    adapter: str | None = None  # hub name or folder of a LoRA adapter to merge
    tokenizer: ClassVar[str | None] = None  # transformers class for checkpoints whose own tokenizer is remote code

    @classmethod
    @abstractmethod
    def matches(cls, config: dict[str, Any]) -> bool:
        """Whether a checkpoint's config.json belongs to this family."""

    @abstractmethod
    def spec(self, config: dict[str, Any]) -> ModelSpec:
        """Reads config.json; raises ValueError for what is missing or not supported."""

    @abstractmethod
    def network(self, spec: ModelSpec) -> Any:
        """The network, a `Model`; on whatever device is torch's default."""

    @abstractmethod
    def weights(self, spec: ModelSpec, experts: ExpertLayout = "separate") -> dict[str, Placement]:
        """Every tensor the checkpoint must have, and where it goes."""

    def finished(self, network: Any, folder: Any) -> Any:
        """The network once it holds the weights of the checkpoint in `folder`. A family may add to it."""
        return network

    def copies(self, spec: ModelSpec) -> dict[str, str]:
        """Names of tied weights that some programs also save, and for each the name in `weights` that it repeats."""
        return {}
