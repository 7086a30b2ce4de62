"""The tools that trained the adapters in the box: low-rank updates, answers of the network itself, and states."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from support.families import CONFIGS, family_for, random_model
from tokenizers import Tokenizer
from torch import Tensor

from dinfer.core.loading.checkpoint import load_network
from dinfer.core.loading.files import locate
from dinfer.core.registry import MODELS
from dinfer.demo.problems import stream
from dinfer.formats.saving import save_network
from tools.json_tiny import IN_PROMPT, Json, masks
from tools.low_rank import LowRank
from tools.rollout import ANSWER, Rollout, answers
from tools.states import States, blocks_of

MASK, EOS, DELETE, SPLIT = 39, 0, 35, 36
PATTERN = r".*(_proj|attn_out|ff_out)"


def test_an_adapter_is_trained_as_it_is_loaded(tmp_path: Path) -> None:
    """Its gradients are those through W + B A, and the file gives the network that was trained."""
    config = CONFIGS["llada"]
    family, ids_BT = family_for(config), torch.arange(2, 14).view(2, 6)
    save_network(random_model("llada"), family, tmp_path / "base", config)
    network = load_network(tmp_path / "base", family, dtype=torch.float32, device=torch.device("cpu"))
    adapter, generator = LowRank(network, family, PATTERN, rank=2, seed=0), torch.Generator().manual_seed(0)
    place, a, b = adapter.pairs["model.transformer.blocks.1.k_proj"]
    with torch.no_grad():
        for _, _, other in adapter.pairs.values():
            other.normal_(std=0.3, generator=generator)
    adapter.merge()
    network.score(ids_BT).square().mean().backward()
    whole = adapter.weights[place.parameter].grad[place.at].clone()
    adapter.pull()
    torch.testing.assert_close(a.grad, b.mT @ whole)
    torch.testing.assert_close(b.grad, whole @ a.mT)
    assert all(weight.grad is None for weight in adapter.weights.values())
    adapter.save(tmp_path / "adapter", "base")
    loaded = MODELS.build({"name": "llada", "adapter": str(tmp_path / "adapter")})
    again = load_network(tmp_path / "base", loaded, dtype=torch.float32, device=torch.device("cpu"))
    torch.testing.assert_close(again.score(ids_BT), network.score(ids_BT), rtol=2e-2, atol=2e-2)  # kept in float16
    with pytest.raises(ValueError, match="matches no matrix"):
        LowRank(network, family, "nothing", rank=2, seed=0)


def test_a_rollout_commits_what_is_sure_and_opens_the_next_block() -> None:
    """Blocks of 4 behind a prompt of 2; the network is sure of places 3 and 6, and of the EOS at 9."""
    tokens_BT = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 0, 0]])
    chance_BT = torch.tensor([[0, 0, 0.5, 0.95, 0.6, 0.4, 0.95, 0.3, 0.2, 0.95, 0.95, 0.95]])
    prompt_B = torch.tensor([2])
    block_BT = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3]])
    rollout = Rollout(threshold=0.9, mask_id=MASK, eos_id=EOS)
    given_BT, step_BT, steps_B = rollout(lambda _: (tokens_BT, chance_BT), tokens_BT, prompt_B, block_BT)
    assert given_BT.equal(tokens_BT)
    # The surest of the first unfinished block is always committed; block 2 opens behind the first step.
    assert step_BT.tolist()[0][:10] == [-1, -1, 2, 0, 1, 3, 1, 4, 5, 1] and steps_B.tolist() == [6]
    alone = Rollout(threshold=0.9, mask_id=MASK, eos_id=EOS, blocks=1)
    _, step_BT, _ = alone(lambda _: (tokens_BT, chance_BT), tokens_BT, prompt_B, block_BT)
    assert step_BT.tolist()[0][6] == 4  # only when block 1 is finished


def test_an_answer_is_what_follows_its_label() -> None:
    tokens_BT = torch.tensor([[9, 3, 9, 4, 5, 0, 0], [9, 3, 3, 3, 3, 0, 0]])  # 9: the label
    found_BX = answers(tokens_BT, torch.tensor([1, 1]), 9, EOS)
    assert found_BX.tolist() == [[9, 4, 5] + [0] * (ANSWER - 3), [0] * ANSWER]


def states(**shares: float) -> States:
    spec = random_model("llada2", delete_token_id=DELETE, split_token_id=SPLIT).spec
    return States(
        spec=spec, digits_X=torch.tensor([3, 4]), block=8, generator=torch.Generator().manual_seed(0),
        **({"drafts": 0.0, "moves": 0.0} | shares),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ([2, 3, 4, 5, 6, 7, 8, 9], [2, 3, 4, 5, 6, 7, 8, 9]),
        ([2, 3, 30, 4, 5, 6, 7, 8], [2, 3, DELETE, 4, 5, 6, 7, 8]),  # one too many
        ([2, 3, 5, 6, 7, 8, 9, 10], [2, 3, SPLIT, 6, 7, 8, 9, 10]),  # one is missing: a mask goes before the 5
        ([2, 30, 4, 6, 7, 8, 9, 10], [2, 3, 4, SPLIT, 7, 8, 9, 10]),  # and one is wrong
        ([2, 3, 4, 30, 31, 32, 33, 34], [2, 3, 4, 5, 6, 7, 8, 9]),  # a move puts nothing right
    ],
)
def test_a_draft_moves_where_that_puts_more_tokens_right(shown: list[int], said: list[int]) -> None:
    tokens_DT = torch.arange(2, 18)[None]
    shown_DT = torch.cat((torch.tensor([shown]), tokens_DT[:, 8:]), 1)
    said_DT, move_DT = states().realigned(shown_DT, tokens_DT, torch.ones(1, 16, dtype=torch.bool))
    assert said_DT[0, :8].tolist() == said and said_DT[0, 8:].equal(tokens_DT[0, 8:])
    assert move_DT[0].tolist() == [token in (DELETE, SPLIT) for token in said] + [False] * 8


def test_states_mask_the_response_alone_and_weigh_one() -> None:
    tokens_BT, prompt_B = torch.arange(2, 34).repeat(16, 1), torch.full((16,), 5)
    step_BT = torch.where(torch.arange(32) < 5, -1, torch.arange(32) % 7).expand(16, -1)

    def read(shown_BT: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        token_DT = torch.where(torch.arange(32) % 8 == 7, 34, tokens_BT[:rows])  # a draft with one wrong in eight
        return token_DT, torch.full(token_DT.shape, 0.95)

    shown_BT, said_BT, weight_BT = states()(tokens_BT, prompt_B, step_BT, read)
    assert said_BT.equal(tokens_BT) and weight_BT.sum().item() == pytest.approx(1)
    assert (weight_BT > 0).equal(shown_BT == MASK) and not (shown_BT[:, :5] == MASK).any()
    shown_BT, said_BT, weight_BT = states(drafts=0.5, moves=0.25)(tokens_BT, prompt_B, step_BT, read)
    assert shown_BT[:, :5].equal(tokens_BT[:, :5]) and not weight_BT[:, :5].any()
    assert not (shown_BT[:8] == MASK).any() and (shown_BT[:8] == 34).any()  # it is as sure of every token
    assert (weight_BT[:8, 5:] > 0).all() and (said_BT[:8] == DELETE).any() and (said_BT[:8] == SPLIT).any()
    assert (weight_BT[8:] > 0).equal(shown_BT[8:] == MASK) and said_BT[8:].equal(tokens_BT[8:])


def test_blocks_are_counted_from_the_prompts_end_or_from_the_beginning() -> None:
    spec, prompt_B = states().spec, torch.tensor([3])
    assert blocks_of(spec, prompt_B, 8, 4).tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]
    d2f = MODELS.build({"name": "llada", "block": 4}).spec(CONFIGS["llada"])
    assert blocks_of(d2f, prompt_B, 8, 4).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2]]


def test_lines_become_the_json_that_a_schema_admits() -> None:
    tokenizer = Tokenizer.from_file(str(locate("tiny") / "tokenizer.json"))
    as_json = Json(tokenizer)
    for problem in islice(stream("train", 0, ("chains", "turns")), 10):
        question, solution = (tokenizer.encode(text).ids for text in (problem.question, problem.solution))
        row = [3, *question, 4, *solution, as_json.eos, as_json.eos]
        for asked in (False, True):
            prompt, said = as_json(row, len(question) + 2, asked)
            assert tokenizer.decode(prompt[1:-1]) == problem.question + (IN_PROMPT if asked else "")
            told = json.loads(tokenizer.decode(said))
            assert [*told["steps"], f"Answer: {told['answer']}"] == problem.solution.split("\n")
            answer = int(problem.answer) if problem.answer.isdigit() else problem.answer
            assert told["answer"] == answer and tokenizer.decode(said) == json.dumps(told)
    assert as_json([3, 4, *tokenizer.encode("no answer").ids], 2, False) is None


def test_masks_of_the_json_lie_in_the_answer_and_reach_its_end() -> None:
    response_BT = torch.arange(100) >= torch.tensor([10, 40])[:, None].repeat(200, 1)
    masked_BT = masks(response_BT, torch.Generator().manual_seed(0))
    assert not (masked_BT & ~response_BT).any()
    behind_BT = torch.arange(100) >= torch.tensor([10 + 64, 40 + 32])[:, None].repeat(200, 1)
    whole_B = (masked_BT | ~behind_BT).all(1)  # all that lies behind the second block
    assert 0.3 < whole_B.float().mean() < 0.9
