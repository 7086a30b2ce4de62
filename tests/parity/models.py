"""Model cases: logits of complete sequences, against `Model.score`.

Padding is checked on the row without it: what is hidden from everyone and only moves positions by a constant changes
nothing for the real tokens, because rotary positions are relative.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parity import uniform
from tests.parity.compare import close
from tests.parity.golden import Case, Fields, Golden, GoldenError, Skip, broken, read_json, read_tensors

# Attention of the goldens -> the argument `attention` of `Model.score`.
ATTENTION = {
    "full_bidirectional": "bidirectional",
    "full_bidirectional_with_key_padding": "bidirectional",
    "full_bidirectional_with_padding": "bidirectional",
    "block_causal": "block_causal",
    "causal": "causal",
}


def cases(golden: Golden) -> Iterator[Case]:
    """The cases of every models/*/cases.json."""
    for path in sorted((golden.root / "models").glob("*/cases.json")):
        prefix = path.parent.relative_to(golden.root).as_posix()
        try:
            doc = Fields(f"{prefix}/cases.json", read_json(path))
            for case in doc.items("cases"):
                name = case.take("name")
                yield Case(f"{prefix}/{name}", partial(run, golden, path, doc, case))
        except GoldenError as error:
            yield broken(f"{prefix}/cases.json", error)


def run(golden: Golden, path: Path, doc: Fields, case: Fields) -> str:
    """Compares the logits of all real tokens."""
    folder = path.parent.relative_to(golden.root).as_posix()
    network = golden.network(folder, doc.take("family"))
    if network.spec.encoder:
        return uniform.run_model(network, case, path.with_suffix(".safetensors"))
    attention = case.take("attention")
    if attention not in ATTENTION:
        raise Skip(f"attention {attention!r:.60} of a model case is not there yet")
    name, tensors = case.take("name"), path.with_suffix(".safetensors")
    ids_BT, logits_BTV = read_tensors(tensors, [f"{name}.input_ids", f"{name}.logits"])
    mask_BT = read_tensors(tensors, [f"{name}.attention_mask"])[0] if "attention_mask" in case else None
    pos_BT = read_tensors(tensors, [f"{name}.position_ids"])[0] if "position_ids" in case else None
    rule: dict[str, Any] = {"attention": ATTENTION[attention]}
    if rule["attention"] == "block_causal":
        rule["block_length"] = case.take("block_length")
    bounds = {"atol": case.take("atol"), "rtol": case.take("rtol")}
    if mask_BT is None and pos_BT is None:
        worst = close("logits", logits_BTV, network.score(ids_BT, **rule), **bounds)
        return f"largest difference {worst:.2g}"
    worst = 0.0
    for row, ids_T in enumerate(ids_BT):
        part = real_tokens(row, ids_T, mask_BT, pos_BT, rule["attention"])
        if part.stop > part.start:
            got_TV = network.score(ids_T[None, part], **rule)[0]
            where = f"logits[{row}, {part.start}:{part.stop}]"
            worst = max(worst, close(where, logits_BTV[row, part], got_TV, **bounds))
    return f"largest difference {worst:.2g}"


def real_tokens(row: int, ids_T: Tensor, mask_BT: Tensor | None, pos_BT: Tensor | None, attention: str) -> slice:
    """Where the tokens of a row are that are not padding. Raises Skip if leaving the padding out is not exact."""
    index_X = torch.arange(len(ids_T)) if mask_BT is None else mask_BT[row].nonzero()[:, 0]
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
