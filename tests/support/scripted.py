"""A model whose logits are a script: whatever stream a test wants, by call and position."""

from __future__ import annotations

import torch
from support.models import EOS, MASK, VOCAB
from torch import Tensor

from dinfer.core.step.contracts import ModelSpec
from dinfer.core.step.model import Attend


def scripted_spec(**fields: object) -> ModelSpec:
    base: dict[str, object] = {
        "family": "scripted", "vocab": VOCAB, "hidden": 1, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2,
        "mlp": 1, "norm_eps": 1e-5, "rope_theta": 1e4, "max_length": 256, "mask_id": MASK, "eos_id": EOS,
        "stop_ids": (EOS,),
    }  # fmt: skip
    return ModelSpec(**(base | fields))


class Scripted:
    """Call c answers position p with `table[c % C, p % P]`. The hidden state of a position is its number."""

    dtype = torch.float64
    device = torch.device("cpu")

    def __init__(self, table_CPV: Tensor, **fields: object) -> None:
        self.spec = scripted_spec(vocab=table_CPV.shape[-1], **fields)
        self.table_CPV = table_CPV
        self.calls = 0

    def embed(self, tokens_BW: Tensor) -> Tensor:
        return tokens_BW[..., None].to(self.dtype)

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        self.calls += 1
        return attend.pos_BW[..., None].to(self.dtype)

    def logits(self, h_BLD: Tensor) -> Tensor:
        page_PV = self.table_CPV[(self.calls - 1) % len(self.table_CPV)]
        return page_PV[h_BLD[..., 0].long() % len(page_PV)]

    def mix(self, logits_BLV: Tensor) -> Tensor:
        return torch.zeros_like(logits_BLV[..., :1])


class Heard(Scripted):
    """Remembers which positions each forward computed."""

    def __init__(self, table: Tensor, **fields: object) -> None:
        super().__init__(table, **fields)
        self.fed: list[list[int]] = []

    def forward(self, x_BWD: Tensor, attend: Attend) -> Tensor:
        self.fed.append([pos for pos in attend.pos_BW[0].tolist() if pos >= 0])
        return super().forward(x_BWD, attend)
