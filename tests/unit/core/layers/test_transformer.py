"""The transformer core against its formulas, written out one position and one head at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file
from support.host import Host
from support.matrix import LEGAL
from support.models import CONFIG, VARIANTS, VOCAB, tiny_model

from dinfer.core.engine.request import Request
from dinfer.core.kernels.attention import attention_interval
from dinfer.core.layers.transformer import Transformer
from dinfer.core.memory import RESERVED, KVPool, PoolSize, Seen
from dinfer.core.models.llada import Llada
from dinfer.core.step.cursors import Phase
from dinfer.formats.saving import save_network

Sees = Callable[[int, int], bool]
IDS = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(0))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum() / len(x) + CONFIG["rms_norm_eps"]) * weight


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """Pairs (i, i + E/2) turned by position * theta^(-2i/E)."""
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * CONFIG["rope_theta"] ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return out


def naive_logits(tensors: dict[str, torch.Tensor], ids: list[int], heads: int, groups: int, sees: Sees) -> torch.Tensor:
    """LLaDA, from a checkpoint's tensors: h += attn_out(attn(n1 h)); h += ff_out(silu(ff_proj n2 h) * up_proj n2 h)."""
    root = "model.transformer"
    table = tensors[f"{root}.wte.weight"]
    stream = [table[token] for token in ids]
    size = table.shape[1] // heads
    for layer in range(CONFIG["n_layers"]):
        w = {k.removeprefix(f"{root}.blocks.{layer}.").removesuffix(".weight"): t for k, t in tensors.items()}
        normed = [norm(x, w["attn_norm"]) for x in stream]
        q = [[turned(h, p) for h in (w["q_proj"] @ x).split(size)] for p, x in enumerate(normed)]
        k = [[turned(h, p) for h in (w["k_proj"] @ x).split(size)] for p, x in enumerate(normed)]
        v = [(w["v_proj"] @ x).split(size) for x in normed]
        for p in range(len(ids)):
            mixed = []
            for h in range(heads):
                g = h // (heads // groups)
                seen = [s for s in range(len(ids)) if sees(p, s)]
                weights = [math.exp(float(q[p][h] @ k[s][g]) / math.sqrt(size)) for s in seen]
                mixed.append(sum(a / sum(weights) * v[s][g] for a, s in zip(weights, seen, strict=True)))
            stream[p] = stream[p] + w["attn_out"] @ torch.cat(mixed)
        for p, x in enumerate(stream):
            gate, up = w["ff_proj"] @ norm(x, w["ff_norm"]), w["up_proj"] @ norm(x, w["ff_norm"])
            stream[p] = x + w["ff_out"] @ (gate / (1 + torch.exp(-gate)) * up)
    head = tensors.get(f"{root}.ff_out.weight", table)
    return torch.stack([head @ norm(x, tensors[f"{root}.ln_f.weight"]) for x in stream])


def checkpoint_tensors(model: Transformer, variant: str, tmp_path) -> dict[str, torch.Tensor]:
    save_network(model, Llada(), tmp_path, CONFIG | VARIANTS[variant][0])
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("variant", ["bidirectional", "shifted", "block_causal", "causal"])
@pytest.mark.parametrize(
    ("attention", "block", "sees"),
    [
        ("bidirectional", None, lambda p, s: True),
        ("causal", None, lambda p, s: s <= p),
        ("block_causal", 4, lambda p, s: s // 4 <= p // 4),
        ("block_causal", 5, lambda p, s: s // 5 <= p // 5),
    ],
)
def test_scores_are_the_formulas(attention: str, block: int | None, sees: Sees, variant: str, tmp_path) -> None:
    """Through the names of a checkpoint, so a projection in the wrong place cannot hide."""
    model = tiny_model(variant)
    tensors = checkpoint_tensors(model, variant, tmp_path)
    got = model.score(IDS, attention, block)
    assert got.shape == (2, 13, VOCAB)
    want = naive_logits(tensors, IDS[1].tolist(), model.spec.heads, model.spec.kv_heads, sees)
    torch.testing.assert_close(got[1], want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention": "diagonal"}, "attention='diagonal' is not known; use one of bidirectional"),
        ({"attention": "block_causal"}, "needs a block_length"),
        ({"attention": "causal", "block_length": 4}, "takes no block_length, got 4"),
        ({"attention": "bidirectional", "block_length": 4}, "takes no block_length"),
        ({"attention": "block_causal", "block_length": 0}, "must be at least 1"),
        ({"ids_BT": [1, 2, 3]}, r"shape \[B, T\]"),
        ({"ids_BT": [[]]}, "must be integers"),
        ({"ids_BT": [[1.0, 2.0]]}, "must be integers"),
        ({"ids_BT": torch.zeros(1, 0, dtype=torch.int64)}, "T >= 1"),
        ({"ids_BT": [[True, False]]}, "must be integers"),
        ({"ids_BT": [[1, VOCAB]]}, "vocabulary"),
        ({"ids_BT": [[-1, 2]]}, "vocabulary"),
    ],
)
def test_score_says_what_is_wrong(given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model().score(**({"ids_BT": IDS} | given))


def test_score_is_differentiable() -> None:
    model = tiny_model().requires_grad_(True)
    loss = model.score(IDS, "block_causal", 4).log_softmax(-1).gather(-1, IDS[..., None]).sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    weight, step = model.blocks[0].qkv.weight, 1e-6
    with torch.no_grad():
        weight[3, 5] += step
    moved = model.score(IDS, "block_causal", 4).log_softmax(-1).gather(-1, IDS[..., None]).sum()
    assert ((moved - loss) / step).item() == pytest.approx(weight.grad[3, 5].item(), rel=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_over_fresh_keys_equals_the_full_forward(variant: str) -> None:
    """Nothing is stale: positions in any order, recomputed over the cache, give the hidden states of a full pass."""
    model = tiny_model(variant)
    spec, (rows, length), page = model.spec, IDS.shape, 4
    pages = -(-length // page)
    kv = KVPool.alloc(spec, PoolSize(rows, length, rows * pages, page), dtype=model.dtype, device="cpu")
    for row in range(rows):
        kv.assign({row: [RESERVED + row + rows * i for i in range(pages)]})
    slot_B, end_B = torch.arange(rows), torch.tensor([length, 9])

    def hidden(pos_BW: torch.Tensor) -> torch.Tensor:
        interval = attention_interval(pos_BW, torch.zeros_like(end_B), end_B, spec.causal_block)
        tokens_BW = IDS.gather(1, pos_BW.clamp_min(0))
        return model(model.embed(tokens_BW), kv.attend(slot_B, pos_BW, Seen(interval), pages))

    every_BW = torch.arange(length).expand(rows, -1)
    full = hidden(torch.where(every_BW < end_B[:, None], every_BW, -1))
    window_BW = torch.tensor([[7, 2, 3, 12, -1], [5, -1, 8, 0, 1]])
    part = hidden(window_BW)
    for row in range(rows):
        for w, pos in enumerate(window_BW[row].tolist()):
            if pos >= 0:
                torch.testing.assert_close(part[row, w], full[row, pos], rtol=1e-10, atol=1e-10)
    attention = {None: "bidirectional", 1: "causal"}.get(spec.causal_block, "block_causal")
    block = spec.causal_block if attention == "block_causal" else None
    torch.testing.assert_close(model.logits(full)[0], model.score(IDS[:1], attention, block)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_padding_and_neighbours_are_never_attended(variant: str) -> None:
    """The first step commits what `score` of the row alone says, though the batch is ragged and pages hold garbage."""
    combination = next(c for c in LEGAL if str(c) == f"{variant}-blockwise-fixed-none")
    recipe = combination.recipe()
    at_once = recipe.resolve({"steps": 1})
    requests = [Request.behind([1, 2, 3], 8, at_once), Request.behind(list(range(4, 20)), 8, at_once)]
    host = Host(recipe, requests)
    spec = recipe.model.spec
    table = host.state.kv.table_NP
    beyond = [p for slot, n in zip(host.slots, host.lengths, strict=True) for p in table[slot, -(-n // host.page) :]]
    assert beyond  # entries that name no page: the zero page
    before = host.state.canvas.tokens_NS.clone()
    host.step(Phase.FULL, host.slots)
    attention = {None: "bidirectional", 1: "causal"}.get(spec.causal_block, "block_causal")
    block = spec.causal_block if attention == "block_causal" else None
    for slot, request, length in zip(host.slots, requests, host.lengths, strict=True):
        ids = before[slot, :length]
        logits = recipe.model.score(ids[None], attention, block)[0].clone()
        waits = logits[:, spec.mask_id].clone()
        logits[:, spec.mask_id] = -math.inf
        start, end = recipe.iteration.first_region(len(request.prompt), length)
        for p in range(max(start, len(request.prompt)), end):
            best_logit, best = logits[max(p - spec.shift, 0)].max(-1)
            token = host.state.canvas.tokens_NS[slot, p]
            assert token == best or (token == spec.mask_id and waits[max(p - spec.shift, 0)] > best_logit)
