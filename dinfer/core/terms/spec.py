"""What a model is: plain data. Differences between model families are fields here, not classes."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol


def _check_counts(said: str, **values: int) -> None:
    """Raises ValueError for a value that is no integer, or below 1. `said`: the message, with {} for name=value."""
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{said.format(f'{name}={value!r}')} must be an integer, at least 1")


class AttentionLayout(NamedTuple):
    """What the window of a row depends on, of a model."""

    shift: int  # `ModelSpec.shift`
    block: int  # `ModelSpec.attention_block`
    prompt: bool  # the prompt is one such block


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts in place of the MLP (DeepSeek-V3, arXiv:2412.19437, whose router has all of this).

    Each token goes to `chosen` of `experts`, by softmax or sigmoid scores of a linear map in float32. `bias` is added
    for the choice alone. With groups, the experts are cut into that many equal parts, a part's score is the sum of its
    two best, and only the best `groups_chosen` parts take part. The mixing weights are the scores of the chosen,
    divided by their sum if `normalize`, times `scale`.
    """

    experts: int
    chosen: int
    width: int  # of each expert's gated MLP
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    groups_chosen: int = 1
    shared: int = 0  # width of the expert that every token goes to; 0: there is none
    dense: tuple[int, ...] = ()  # layers that have a plain MLP after all
    capacity: int | None = None  # experts that the tokens of one attention block may use between them (LLaDA2.2)

    def __post_init__(self) -> None:
        _check_counts(
            "{} of the experts", experts=self.experts, chosen=self.chosen, width=self.width, groups=self.groups,
            groups_chosen=self.groups_chosen,
        )  # fmt: skip
        if self.experts % self.groups or self.groups_chosen > self.groups:
            raise ValueError(
                f"{self.experts} experts must divide into groups={self.groups}, of which groups_chosen="
                f"{self.groups_chosen} are kept"
            )
        able = min(self.experts // self.groups * self.groups_chosen, self.capacity or self.experts)
        if self.chosen > able:
            raise ValueError(f"chosen={self.chosen} experts a token exceed the {able} there are to choose from")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """Layers whose queries see `window` positions at most, with heads and a rotation of their own (Gemma)."""

    layers: tuple[int, ...]
    window: int  # a query's own position included
    kv_heads: int
    head_dim: int
    rope_theta: float

    def __post_init__(self) -> None:
        _check_counts("{} of the local layers", window=self.window, kv_heads=self.kv_heads, head_dim=self.head_dim)


class Stretch(Hashable, Protocol):
    """How rotary frequencies were changed for longer texts."""

    def scaled(self, frequency_X: Any) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What the rest of dinfer may know of a model."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width of the gated MLP
    norm_eps: float
    rope_theta: float
    rope_dim: int | None = None  # entries of a head that are rotated, the first ones; None: all
    rope_pairs: int | None = None  # pairs of entries that are rotated, at the angles of a whole head; None: all
    rope_stretch: Stretch | None = None  # None: frequencies are powers of rope_theta
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head, before it is rotated
    experts: ExpertSpec | None = None
    local: LocalAttention | None = None  # None: all layers are alike
    softcap: float | None = None  # c: logits become c * tanh(logits / c)
    tied_head: bool = False  # the LM head is the embedding table
    max_length: int  # positions the model was made for
    mask_id: int | None  # None: what is still to be decoded holds uniform noise
    eos_id: int  # what an early-stopped tail is filled with
    stop_ids: tuple[int, ...]  # ids that end an answer, eos_id among them
    delete_id: int | None = None  # predicted where a token is to be taken out; None: the model does not
    split_id: int | None = None  # predicted where a mask is to be put in
    shift: int = 0  # 1: the logits at position p predict token p + 1 (Dream)
    causal_block: int | None = None  # None: bidirectional; n: block-causal over n positions; 1: autoregressive
    prompt_block: bool = False  # the prompt is one attention block, and the others are counted from its end (D2F)
    prompt_whole: bool = True  # False: with prompt_block, the prompt too is in such blocks, and the first may be short
    encoder: bool = False  # before the active region it is causal, with scalars of its own, and sees nothing behind it
    self_conditioning: bool = False  # it was trained to be told what it expected one step before

    def __post_init__(self) -> None:
        _check_counts(
            f"{self.family}: {{}}", vocab=self.vocab, hidden=self.hidden, layers=self.layers, heads=self.heads,
            kv_heads=self.kv_heads, head_dim=self.head_dim, mlp=self.mlp, max_length=self.max_length,
        )  # fmt: skip
        for name, value in (("norm_eps", self.norm_eps), ("rope_theta", self.rope_theta)):
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{self.family}: {name}={value!r} must be a number above 0")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.family}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}, and "
                f"head_dim={self.head_dim} even"
            )
        if self.rope_dim is not None and (self.rope_dim % 2 or not 0 < self.rope_dim <= self.head_dim):
            raise ValueError(f"{self.family}: rope_dim={self.rope_dim} must be even, 2 to head_dim={self.head_dim}")
        if self.local is not None and not self.encoder:
            raise ValueError(f"{self.family}: local layers are there for models with an encoder only")
        if self.encoder and (self.shift or self.causal_block is not None):
            raise ValueError(f"{self.family}: an encoder goes with neither shift nor causal_block")
        if self.prompt_block and (self.causal_block is None or (self.experts and self.experts.capacity)):
            raise ValueError(f"{self.family}: prompt_block needs causal_block, and experts without a capacity")
        masks = [] if self.mask_id is None else [("mask_id", self.mask_id)]
        masks += [*zip(("delete_id", "split_id"), self.moving_ids, strict=False)]
        for name, token in (*masks, *(("stop_ids", token) for token in self.stop_ids)):
            if type(token) is not int or not 0 <= token < self.vocab:
                raise ValueError(f"{self.family}: {name} must be a token of the vocabulary of {self.vocab}: {token!r}")
        if self.eos_id not in self.stop_ids or self.mask_id in self.stop_ids:
            raise ValueError(
                f"{self.family}: eos_id={self.eos_id} must be one of stop_ids={self.stop_ids}, and "
                f"mask_id={self.mask_id} none of them"
            )
        if len({self.mask_id, *self.moving_ids, *self.stop_ids}) < 1 + len(self.moving_ids) + len(set(self.stop_ids)):
            raise ValueError(
                f"{self.family}: delete_id={self.delete_id} and split_id={self.split_id} must differ, and be neither "
                "mask_id nor one of stop_ids"
            )

    @property
    def moving_ids(self) -> tuple[int, ...]:
        """The delete and the split token, which stand for operations; empty if the model has none."""
        return tuple(token for token in (self.delete_id, self.split_id) if token is not None)

    @property
    def attention_block(self) -> int:
        """Positions of an attention block, which see each other and all blocks before; 0: all positions do."""
        return 1 if self.encoder else self.causal_block or 0

    def origin(self, prompt: Any) -> Any:
        """Where attention blocks are counted from, behind a prompt of so many positions; all before is one block."""
        return prompt if self.prompt_whole else prompt % (self.causal_block or 1)

    @property
    def attention_layout(self) -> AttentionLayout:
        return AttentionLayout(self.shift, self.attention_block, self.prompt_block)

    @property
    def mask(self) -> int:
        """The mask token. Raises ValueError if the model has none."""
        if self.mask_id is None:
            raise ValueError(
                f"{self.family} has no mask token: it generates behind a prompt, but can neither fill gaps nor be "
                "guided. Use a model with a mask token for that."
            )
        return self.mask_id


ExpertLayout = Literal["separate", "fused", "merged"]
"""How a checkpoint stores a layer's experts: three tensors each; gate and up of all of them in one tensor, down in
another (dInfer's converter); or a tensor for each of the three, with all experts (dFactory)."""
