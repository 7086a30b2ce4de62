"""Steps of several ranks: the tokens of one rank, whole logits in no gather, and a request's own failure alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import CASES, CPU, MODELS, VOCAB, Case, decode, save
from support.thread_ranks import together

import dinfer
from dinfer.core.engine.errors import NonFiniteLogits
from dinfer.core.loading.checkpoint import load_network
from dinfer.core.ranks.ranks import ALONE, Ranks
from dinfer.core.sampling.gumbel import StandardSampling
from dinfer.core.step.contracts import BlockView, ModelSpec
from dinfer.core.step.model import Options
from dinfer.core.terms.stats import VocabularySlice

BY_PARTS = ["draws", "top-k", "penalties", "last stop tokens", "guidance", "guided draws", "draws of candidates"]
UNTIED = "llada, 12 key heads"
POISON = 27  # a token of rank 1, of 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name in (UNTIED, "llada, many tokens", "llada2", "sdar_moe", "diffusion_gemma"):
        save(name, folder)
    return folder


@pytest.fixture(autouse=True)
def no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have led ranks."""
    for module in ("divided_model", "leader"):  # the one that takes it from the other first
        monkeypatch.setattr(f"dinfer.scale.parallel.{module}.leader", lambda: None)


def case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.rest(but=4)
@pytest.mark.parametrize(("name", "ranks"), [*zip([*BY_PARTS, "a nucleus of many"], cycle([2, 3]), strict=False)])
def test_ranks_draw_and_guide_by_their_own_logits(name: str, ranks: int, folder: Path) -> None:
    own = case(f"llada, {name}")
    found, widths = together(ranks, lambda each: decode(own, folder, each))
    assert found == [decode(own, folder)] * ranks
    whole = -(-VOCAB // ranks)
    assert max(widths) < whole - 1 if name in BY_PARTS else max(widths) == whole


@dataclass(frozen=True, kw_only=True)
class Sorted(StandardSampling):
    """Looks at all tokens at once."""

    by_parts = False

    def adjust(
        self, logits_RLV: torch.Tensor, view: BlockView, options: Options, spec: ModelSpec, columns: VocabularySlice
    ) -> torch.Tensor:
        assert logits_RLV.shape[-1] == columns.count == spec.vocab == VOCAB
        return super().adjust(logits_RLV - logits_RLV.logsumexp(-1, keepdim=True), view, options, spec, columns)


def test_a_sampling_that_needs_all_logits_gets_them(folder: Path) -> None:
    own = replace(case("llada, draws"), sampling=Sorted(temperature=0.8, seed=5))
    found, _ = together(2, lambda each: decode(own, folder, each))
    assert found == [decode(own, folder)] * 2


@pytest.mark.parametrize(("name", "ranks"), [("llada2", 4), ("sdar_moe", 3), ("diffusion_gemma", 2)])
def test_experts_may_be_dealt_out_whole(name: str, ranks: int, folder: Path) -> None:
    own = case(f"{name}, experts dealt out")
    found, _ = together(ranks, lambda each: decode(own, folder, each))
    assert found == [decode(own, folder)] * ranks


def poisoned(folder: Path, ranks: Ranks) -> dinfer.Pipeline:
    """A model that gives NaN where a prompt holds POISON."""
    network: Any = load_network(
        folder / UNTIED, MODELS[UNTIED][0], dtype=torch.float64, device=CPU, rank=ranks.rank
    )  # fmt: skip
    network.join(ranks)
    first, end = ranks.vocabulary(network.spec.vocab)
    if first <= POISON < end:
        network.embedding.weight[POISON - first] = float("nan")
    recipe = dinfer.compose(network, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    return dinfer.Pipeline(recipe, None, dinfer.Runtime(tensor_parallel=ranks.size))


def ends(folder: Path, ranks: Ranks = ALONE) -> list[Any]:
    """The canvases of three requests that run together, or the names of their errors."""
    pipe, found = poisoned(folder, ranks), {}
    requests = pipe.requests([[1, 5, 9], [1, POISON, 3], [4, 4]], 16, None)
    engine = pipe.engine
    with torch.inference_mode():
        names = [engine.add(request) for request in requests]
        while engine.busy:
            for update in engine.step():
                if update.error is not None:
                    found[update.index] = type(update.error)
                elif update.completion is not None:
                    found[update.index] = update.completion.canvas
    return [found[name] for name in names]


def test_a_request_with_broken_logits_fails_alone_on_all_ranks(folder: Path) -> None:
    """The broken row of the embedding is one that a rank looks up for tokens that it does not have."""
    want = ends(folder)
    assert [kind is NonFiniteLogits for kind in want] == [False, True, False]
    found, _ = together(2, lambda ranks: ends(folder, ranks))
    assert found == [want] * 2


def rolled(folder: Path, ranks: Ranks = ALONE) -> Any:
    """What two groups of samples record."""
    network: Any = load_network(
        folder / UNTIED, MODELS[UNTIED][0], dtype=torch.float64, device=CPU, rank=ranks.rank
    )  # fmt: skip
    network.join(ranks)
    recipe = dinfer.compose(network, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache="dual")
    pipe = dinfer.Pipeline(recipe, None, dinfer.Runtime(tensor_parallel=ranks.size))
    made = pipe.rollout([[1, 5, 9], [4, 4]], n=2, max_new_tokens=16, temperature=0.8, record="events")
    assert made.steps is not None and made.events is not None
    return made.answer_ids.tolist(), made.steps.tolist(), [one.tolist() for one in made.events], made.logps


def test_ranks_record_what_one_does(folder: Path) -> None:
    *want, logps = rolled(folder)
    found, _ = together(2, lambda ranks: rolled(folder, ranks))
    for *own, said in found:
        assert own == want
        torch.testing.assert_close(said, logps)
