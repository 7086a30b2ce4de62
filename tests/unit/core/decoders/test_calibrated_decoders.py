"""Prophet, and confidence calibrated by place and token: against the formulas, written here once more."""

import json
import math
from pathlib import Path

import pytest
import torch
from support.decoding import PROMPT, decoded, script
from support.matrix import TOKEN_COUNTS

from dinfer.research.kernels.blocks import density

# Prophet


@pytest.mark.parametrize("late", [1, 5, 9])
def test_prophet_commits_all_that_is_left_once_the_answer_is_sure(late: int) -> None:
    """A lead of 3 logits at the answer, from step `late` on of 12, and none elsewhere."""
    table = script(12, 24, seed=2, scale=0.5)
    table[late:, PROMPT + 9 : PROMPT + 14, 3] = table[late:, PROMPT + 9 : PROMPT + 14].amax(-1) + 3.0
    decoder = {"name": "prophet", "steps": 12, "sub_block": 8, "answer": 9, "early": 2.5, "mid": 2.5, "late": 2.5}
    found = decoded(decoder, table)
    assert [len(positions) for positions in found] == [2 * (step + 1) for step in range(late)] + [24]
    assert all(max(positions) < 8 * (step // 4 + 1) for step, positions in enumerate(found[:-1]))


def test_prophet_asks_less_as_its_steps_run_out() -> None:
    """Without an answer all that is masked counts: a lead of 3 logits everywhere is enough in the last third alone."""
    table = script(1, 24, seed=2, scale=0.0)
    table[..., 5] = 3.0
    sizes = [len(positions) for positions in decoded({"name": "prophet", "steps": 12}, table)]
    assert sizes == [2 * (step + 1) for step in range(8)] + [24]  # 9 of 12 is the first above 0.67


# Calibrated


@pytest.mark.parametrize("sigma", [0.4, 3.0, 20.0])
def test_the_density_is_the_gaussian_share_of_decoded_neighbours(sigma: float) -> None:
    """Against the sum over three generations, with blocks at the beginning, in the middle and at the end."""
    prompt, new, block = 5, 20, 8
    decoded_RL = torch.rand(3, block, generator=torch.Generator().manual_seed(0)) < 0.5
    decoded_RL[2, 3] = True  # the last of all
    pos_RL = torch.stack([torch.arange(start, start + block) for start in (5, 13, 21)])
    pos_RL[2, 4:] = -1
    found = density(decoded_RL, pos_RL, torch.full((3,), prompt), torch.full((3,), prompt + new), sigma)
    for row, start in enumerate((5, 13, 21)):
        known = {p: p < start for p in range(prompt - new, prompt + 2 * new)}
        known |= {start + i: bool(decoded_RL[row, i]) for i in range(block) if start + i < prompt + new}
        known |= {p: known[prompt + new - 1] for p in range(prompt + new, prompt + 2 * new)}
        for i in range(min(block, prompt + new - start)):
            weight = {p: math.exp(-((start + i - p) ** 2) / (2 * sigma**2)) for p in known}
            total = sum(math.exp(-(d**2) / (2 * sigma**2)) for d in range(-3 * new, 3 * new))
            want = sum(weight[p] for p in known if known[p]) / total
            assert float(found[row, i]) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("threshold", [0.4, 1.5, 9.0])
def test_frequent_tokens_need_more_confidence(threshold: float) -> None:
    table, counts = script(1, 16, seed=8, scale=2.0), json.loads(TOKEN_COUNTS.read_text())
    top = table[0, PROMPT:].softmax(-1).max(-1)
    times = [counts["counts"].get(str(int(token)), 1) / counts["total"] for token in top.indices]
    score = [min(float(p) * -math.log(f + 1e-10), 2.0) for p, f in zip(top.values, times, strict=True)]
    best = max(range(16), key=score.__getitem__)
    decoder = {
        "name": "calibrated",
        "sigma": 0.0,
        "frequencies": str(TOKEN_COUNTS),
        "threshold": threshold,
        "clip": 2.0,
    }
    assert decoded(decoder, table)[0] == {best, *(i for i in range(16) if score[i] >= threshold)}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read: FileNotFoundError"),
        ("[]", "cannot be read: TypeError"),
        ('{"total": 10}', "cannot be read: KeyError"),
        ('{"total": 0, "counts": {}}', "must have a total above 0"),
        ('{"total": 10, "counts": {"40": 3}}', "token ids below 40"),
        ('{"total": 10, "counts": {"3": 11}}', "counts up to the total"),
    ],
)
def test_a_file_of_frequencies_that_cannot_be_used_says_why(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "counts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        decoded({"name": "calibrated", "frequencies": str(path)}, script(1, 4))
