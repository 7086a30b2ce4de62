"""Model cases: logits of complete sequences, against `Transformer.score`.

Padding is checked on the row without it: what is hidden from everyone and only moves positions by a constant changes
nothing for the real tokens, because rotary positions are relative.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.layers.transformer import WholeAttend
from tests.parity.golden import Case, Fields, Golden, Skip
from tests.parity.kinds import uniform

# Attention of the goldens -> the argument `attention` of `Transformer.score`.
ATTENTION = {
    "full_bidirectional": "bidirectional",
    "full_bidirectional_with_key_padding": "bidirectional",
    "full_bidirectional_with_padding": "bidirectional",
    "block_causal": "block_causal",
    "causal": "causal",
    "causal_gated_lora": "causal",
}


def block_behind(length: int, block: int) -> Tensor:
    """Causal but for the last `block` rows, which see everything. bool [T, T]"""
    seen_TT = torch.ones(length, length, dtype=torch.bool).tril()
    seen_TT[-block:] = True
    return seen_TT


# Attention that no argument of `score` stands for: what each row sees, of length and block length.
SEEN = {
    "causal_then_block": block_behind,
    "causal_in_fed_order": lambda length, block: torch.ones(length, length, dtype=torch.bool).tril(),
}
FILES = "models/*/cases.json"


def takes(doc: Fields) -> bool:
    return True


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    """The cases of one model."""
    prefix = path.parent.relative_to(golden.root).as_posix()
    for case in doc.items("cases"):
        yield Case(f"{prefix}/{case.take('name')}", partial(run, golden, path, doc, case))


def run(golden: Golden, path: Path, doc: Fields, case: Fields) -> str:
    """Compares the logits of all real tokens."""
    folder = path.parent.relative_to(golden.root).as_posix()
    attention = case.take("attention")
    network = golden.network(folder, doc.take("family"), attention == "causal_gated_lora")
    if network.spec.encoder:
        return uniform.run_model(golden, network, case, path.with_suffix(".safetensors"))
    if attention in SEEN:
        return seen(golden, network, case, path.with_suffix(".safetensors"))
    if attention not in ATTENTION:
        raise Skip(f"attention {attention!r:.60} of a model case is not there yet")

    def tensor(part: str) -> Tensor:
        return golden.tensors(path.with_suffix(".safetensors"), f"{case.take('name')}.{part}")[0]

    ids_BT, logits_BTV = tensor("input_ids"), tensor("logits")
    padded = attention.endswith("_padding")
    mask_BT = tensor("attention_mask") if padded or "attention_mask" in case else None
    pos_BT = tensor("position_ids") if "position_ids" in case else None
    rule: dict[str, Any] = {"attention": ATTENTION[attention]}
    if rule["attention"] == "block_causal":
        rule["block_length"] = case.take("block_length")
    bounds = {"atol": case.take("atol"), "rtol": case.take("rtol")}
    if mask_BT is None and pos_BT is None and attention != "causal_gated_lora":
        worst = golden.close("logits", logits_BTV, network.score(ids_BT, **rule), **bounds)
        return f"largest difference {worst:.2g}"
    if attention == "causal_gated_lora":
        with network.gate.on(tensor("lora_rows") > 0):
            got_BTV = network.score(ids_BT, attention="causal")
        return f"largest difference {golden.close('logits', logits_BTV, got_BTV, **bounds):.2g}"
    worst = 0.0
    for row, ids_T in enumerate(ids_BT):
        part = real_tokens(row, ids_T, mask_BT, pos_BT, rule["attention"])
        if part.stop > part.start:
            got_TV = network.score(ids_T[None, part], **rule)[0]
            where = f"logits[{row}, {part.start}:{part.stop}]"
            worst = max(worst, golden.close(where, logits_BTV[row, part], got_TV, **bounds))
    return f"largest difference {worst:.2g}"


def seen(golden: Golden, network: Any, case: Fields, path: Path) -> str:
    """Compares logits of whole sequences whose rows see what `SEEN` says."""
    ids_BT, logits_BTV = golden.tensors(path, f"{case.take('name')}.input_ids", f"{case.take('name')}.logits")
    pos_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    if case.take("attention") == "causal_in_fed_order":
        pos_BT = golden.tensors(path, f"{case.take('name')}.position_ids")[0]
    seen_TT = SEEN[case.take("attention")](ids_BT.shape[1], case.take("block_length", 0)).to(ids_BT.device)
    attend = WholeAttend(pos_BT, seen_TT.expand(len(ids_BT), -1, -1))
    got_BTV = network.logits(network(network.embed(ids_BT), attend))
    worst = golden.close("logits", logits_BTV, got_BTV, atol=case.take("atol"), rtol=case.take("rtol"))
    return f"largest difference {worst:.2g}"


def real_tokens(row: int, ids_T: Tensor, mask_BT: Tensor | None, pos_BT: Tensor | None, attention: str) -> slice:
    """Where the tokens of a row are that are not padding. Raises Skip if leaving the padding out is not exact."""
    index_X = torch.arange(len(ids_T), device=ids_T.device) if mask_BT is None else mask_BT[row].nonzero()[:, 0]
    if len(index_X) == 0:
        return slice(0, 0)
    part = slice(int(index_X[0]), int(index_X[-1]) + 1)
    if part.stop - part.start != len(index_X):
        raise Skip("padding between tokens is not there yet")
    pos_X = index_X if pos_BT is None else pos_BT[row, part]
    if bool((pos_X.diff() != 1).any()):
        raise Skip("positions that do not count up one by one are not there yet")
    if attention == "block_causal" and int(index_X[0]) > 0:
        raise Skip("padding under block-causal attention is not there yet")
    return part
