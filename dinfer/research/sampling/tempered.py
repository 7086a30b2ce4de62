"""Confidences of the distribution that is drawn from (Dream, arXiv:2508.15487; D2F, arXiv:2508.09192)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from dinfer.core.registry import SAMPLINGS
from dinfer.core.sampling.gumbel import StandardSampling, put_last
from dinfer.core.step.cursors import BlockView
from dinfer.core.step.model import Options
from dinfer.core.terms.spec import ModelSpec
from dinfer.core.terms.stats import Draw, VocabularySlice


@SAMPLINGS.register("tempered")
@dataclass(frozen=True, kw_only=True)
class TemperedSampling(StandardSampling):
    """As `standard`, but confidences are those of the distribution that is drawn from, as Dream and D2F publish it.

    A token that is alone in its nucleus has probability 1, and a low temperature makes every token sure. So decoders
    that compare confidences with a threshold commit more at once, and err more. At temperature 0 both cuts hold with
    T = 1.
    """

    paper = "Dream, arXiv:2508.15487; D2F, arXiv:2508.09192"

    def greedy(self, options: Mapping[str, float]) -> bool:
        return False

    def draw(
        self, logits_RLV: Tensor, count_RV: Tensor, view: BlockView, options: Options, spec: ModelSpec, top: int,
        columns: VocabularySlice,
    ) -> Draw:  # fmt: skip
        draw = super().draw(logits_RLV, count_RV, view, options, spec, top, columns)
        belief_RLV = draw.logits_RLV.clone()
        put_last(columns.at(belief_RLV, *spec.stop_ids), options["eos_last"])
        return replace(draw, belief_RLV=belief_RLV)
