"""The autoregressive model that is converted: its weights as plain tensors, its layers as pure functions of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

FAMILIES = ("llama", "qwen2", "qwen3")
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Weights = dict[str, Any]  # of a layer: tensors, or None where the family has none


class ConversionError(ValueError):
    """What is asked for cannot be done; the message says why, and what to do instead."""


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file that takes the place of `path` once it is written: nothing half-written stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Chat:
    """How a conversation of one question begins and goes on, as token ids."""

    before: tuple[int, ...]
    after: tuple[int, ...]  # the end of the question, and the opening of the answer
    stop: int  # ends an answer
    mask: int


@dataclass
class Base:
    """A checkpoint on a device."""

    model: Any  # of transformers, in float32 unless `dtype` says otherwise
    tokenizer: Any
    chat: Chat
    device: torch.device
    dtype: torch.dtype  # of matrix products
    turns: list[Tensor] = field(default_factory=list)  # cos and sin of all positions, once they were asked for

    @property
    def body(self) -> Any:
        found = self.model
        while not hasattr(found, "layers"):
            found = found.model if hasattr(found, "model") else found.base_model
        return found

    @property
    def shape(self) -> tuple[int, int, int, float]:
        """Heads, key heads, entries of a head, and the norms' epsilon."""
        config = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads, config.num_key_value_heads, size, config.rms_norm_eps

    def table(self) -> Tensor:
        """The embedding. [V, D]"""
        return self.body.embed_tokens.weight

    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [...], each [..., E]."""
        if not self.turns:
            every = torch.arange(self.model.config.max_position_embeddings, device=self.device)
            self.turns += [
                one[0].float() for one in self.body.rotary_emb(torch.zeros(1, device=self.device), every[None])
            ]
        cos, sin = (table[positions] for table in self.turns)
        return cos, sin

    def layers(self) -> list[Weights]:
        return [_weights(layer) for layer in self.body.layers]


def load(path: Path, device: torch.device, dtype: torch.dtype, mask: str | None = None) -> Base:
    """Reads a folder or GGUF file. `mask`: the token that stands for what is open. Raises ConversionError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = path.suffix == ".gguf"
    if not (path.is_file() if gguf else (path / "config.json").is_file()):
        raise ConversionError(f"{path} is neither a GGUF file nor a folder with config.json: name the base checkpoint")
    where, extra = (path.parent, {"gguf_file": path.name}) if gguf else (path, {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True, **extra)
        model: Any = AutoModelForCausalLM.from_pretrained(where, local_files_only=True, dtype=torch.float32, **extra)
    except Exception as error:  # of any of its parts: files cut short, a package that GGUF needs
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConversionError(f"{path} could not be read by transformers: {said}") from error
    if model.config.model_type not in FAMILIES:
        raise ConversionError(
            f"{path}: model_type={model.config.model_type!r} cannot be converted; the base must be one of "
            f"{', '.join(FAMILIES)}"
        )
    if gguf:  # whose weights are floats now; transformers would save none of a quantised model
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config, model.config._model_name_or_path
    model.requires_grad_(False).eval().to(device)
    return Base(model, tokenizer, chat_of(tokenizer, model.config, mask), device, dtype)


def chat_of(tokenizer: Any, config: Any, mask: str | None) -> Chat:
    """The ids around a question, by the chat template. Raises ConversionError without a template or mask token."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConversionError("the base has no chat template: convert an instruction model, which has one")
    marked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0question\0"}], add_generation_prompt=True, tokenize=False
    )
    before, said, after = marked.partition("\0question\0")
    opening, closing = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (before, after))
    if not said or not closing:
        raise ConversionError(
            "the base's chat template must write a question and something behind it: give it another chat_template"
        )
    names = [mask] if mask else ["<|mask|>", "<empty_output>", "<|fim_pad|>", "<|reserved_special_token_0|>"]
    vocabulary = tokenizer.get_vocab()
    found = [vocabulary[name] for name in names if vocabulary.get(name, config.vocab_size) < config.vocab_size]
    if not found:
        raise ConversionError(f"the vocabulary has none of {names}: give --mask, a token that no text has")
    return Chat(opening, closing, stop=closing[0], mask=found[0])


def _weights(layer: Any) -> Weights:
    """A layer's tensors. Of an adapted matrix also its pair, by the names NAME.a and NAME.b."""
    found: Weights = {"norm1": layer.input_layernorm.weight, "norm2": layer.post_attention_layernorm.weight}
    for name in LINEAR:
        module = getattr(layer.self_attn, name, None) or getattr(layer.mlp, name)
        plain = getattr(module, "base_layer", module)
        found |= {name: plain.weight, f"{name}.bias": plain.bias, f"{name}.a": None, f"{name}.b": None}
        if plain is not module:
            pair = (module.lora_A["default"].weight, module.lora_B["default"].weight)
            found |= {f"{name}.a": pair[0], f"{name}.b": pair[1], f"{name}.scale": module.scaling["default"]}
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer.self_attn, name, None)
        found[name] = None if norm is None else norm.weight
    return found


def cast(layers: list[Weights], dtype: torch.dtype) -> list[Weights]:
    """The same with frozen matrices in `dtype`. What is trained, and norms, stay as they are."""
    frozen = lambda name, one: name in LINEAR and not one.requires_grad  # noqa: E731
    return [{name: one.to(dtype) if frozen(name, one) else one for name, one in layer.items()} for layer in layers]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm, in float32."""
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * weight.float()


def project(x: Tensor, w: Weights, name: str) -> Tensor:
    """A linear layer, with its adapter where it has one."""
    bias = w[f"{name}.bias"]
    found = F.linear(x, w[name].to(x.dtype), None if bias is None else bias.to(x.dtype))
    if w[f"{name}.a"] is None:
        return found
    low = F.linear(F.linear(x, w[f"{name}.a"].to(x.dtype)), w[f"{name}.b"].to(x.dtype))
    return found + low * w[f"{name}.scale"]


def heads_of(x: Tensor, w: Weights, cos: Tensor, sin: Tensor, shape: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values. x [B, T, D], cos and sin [T, E] -> [B, N, T, E]"""
    heads, kv_heads, size, eps = shape
    sizes = (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    q, k, v = (project(x, w, name).unflatten(-1, (n, size)).transpose(1, 2) for name, n in sizes)
    if w["q_norm"] is not None:
        q, k = norm(q, w["q_norm"], eps).to(x.dtype), norm(k, w["k_norm"], eps).to(x.dtype)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


def mlp(x: Tensor, w: Weights, eps: float, dtype: torch.dtype) -> Tensor:
    h = norm(x, w["norm2"], eps).to(dtype)
    return x + project(F.silu(project(h, w, "gate_proj")) * project(h, w, "up_proj"), w, "down_proj")


def mixed(q: Tensor, k: Tensor, v: Tensor, seen: Any) -> Tensor:
    """Attention. [B, N, T, E]; `seen`: a mask that is added, [T, T] or [B, T, T], or a BlockMask of flex attention."""
    heads = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(heads, 1) for one in (k, v))
    if isinstance(seen, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(-3))
    found: Tensor = flex_attention(q, k, v, block_mask=seen)
    return found


def masked_layer(x: Tensor, w: Weights, cos: Tensor, sin: Tensor, seen: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    """A layer over whole sequences. x [B, T, D] float32; cos and sin [T, E] or [B, 1, T, E]; `seen`: see `mixed`."""
    q, k, v = heads_of(norm(x, w["norm1"], shape[3]).to(dtype), w, cos, sin, shape)
    x = x + project(mixed(q, k, v, seen).transpose(1, 2).flatten(2), w, "o_proj")
    return mlp(x, w, shape[3], dtype)


def hidden(base: Base, layers: list[Weights], tokens: Tensor, positions: Tensor, seen: Any, layer: Any) -> Tensor:
    """What the head is applied to. tokens [B, T], positions [T] or [B, T], `seen`: see `mixed` -> [B, T, D]"""
    x = F.embedding(tokens, base.table()).float()
    x = x.requires_grad_(torch.is_grad_enabled())  # as later layers' inputs: one compiled layer serves all
    cos, sin = (table if positions.dim() == 1 else table[:, None] for table in base.rotation(positions))
    for w in layers:
        x = layer(x, w, cos, sin, seen, base.shape, base.dtype)
    return norm(x, base.body.norm.weight, base.shape[3]).to(base.dtype)


def visible(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to scores."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -math.inf)


def causal_scores(base: Base, layers: list[Weights], rows: list[list[int]], pad: int) -> Iterator[Tensor]:
    """Log-probabilities [T-1] of each row's tokens from the second on, by the autoregressive model."""
    width = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=base.device)
    places = torch.arange(width, device=base.device)
    seen = visible(places[:, None] >= places[None], base.dtype)
    h = hidden(base, layers, tokens, places, seen, masked_layer)
    for i, row in enumerate(rows):
        scores = (h[i, : len(row) - 1] @ base.head().to(h.dtype).T).float().log_softmax(-1)
        yield scores.gather(1, tokens[i, 1 : len(row), None])[:, 0]


Layer = Callable[..., Tensor]
