"""The mixture of experts on a GPU: which kernels run, and where a shared expert joins the others."""

from torch import Tensor

from dinfer.core.kernels.moe import ExpertWeight, Gate, Shared
from dinfer.core.kernels.types import Deferred, PartialSums
from dinfer.kernels.triton.moe import combine, plan

DEFERRED = 8192  # tokens up to which the consumer adds up the outputs of their experts
TOGETHER = 1024  # tokens up to which a shared expert is one more of the experts; for more, cuBLAS is faster


def mixture(
    x: Deferred, experts_NC: Tensor, weights_NC: Tensor, gate_up: ExpertWeight, down: ExpertWeight, gated: Gate,
    shared: Shared | None, pairs_per_expert: float,
) -> Tensor | PartialSums:  # fmt: skip
    """See `dinfer.core.kernels.moe.expert_mixture`. `x`: rows [N, D]"""
    tokens, plus_ND, joined = len(experts_NC), None, False
    if shared is not None:
        more, wider = None, None
        if shared.weights is not None:
            more, wider = gate_up.joined(shared.weights[0]), down.joined(shared.weights[1])
        if more is not None and wider is not None and tokens <= TOGETHER:
            gate_up, down, joined = more, wider, True
        else:
            plus_ND = shared.mlp(x)
    made = plan(experts_NC, len(gate_up.each), down.rows_of_tile(pairs_per_expert), joined)
    out_PD = down.mixed_rows(gate_up.gated_rows(x, made, gated, down), made)
    if tokens <= DEFERRED:  # more rows would fill memory until they are read
        return PartialSums(out_PD, out_PD.dtype, weights_NC.float().contiguous(), plus_ND)
    return combine(out_PD, weights_NC, plus_ND)
