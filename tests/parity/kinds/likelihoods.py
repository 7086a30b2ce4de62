"""Cases of likelihood estimators: their masks are given, and what dinfer makes of them is compared.

Where masks are no matter of chance, those that dinfer draws must be the recorded ones.
"""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dinfer.core.loading.checkpoint import load_network
from dinfer.lab.likelihood import LIKELIHOODS, Mask, Passes, Samples, Scored, combine, compare, logps, passes
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden, need

FILES = "*/*_[0-9][0-9]_*.json"
RUNS = ("trajectory", "edits", "weight_update")  # of which runs are recorded, see `tests.parity.kinds.rollouts`
LOGP, RESULT = 2e-4, 5e-4  # tolerances that the goldens suggest: so much times 1 + |value|
# Names of options in the goldens, and what is said otherwise here.
NAMES = {"times": "samples", "min": "low", "max": "high"}
ORIGINS = {"global": "position", "response": "prompt"}


def takes(doc: Fields) -> bool:
    return "estimator" in doc and doc.take("estimator") not in RUNS


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, golden, doc))


def run(golden: Golden, doc: Fields) -> str:
    """Every log-probability that counts, and all that is expected of their combination."""
    need(LIKELIHOODS, name := doc.text("estimator"))
    family, mask_id, eos_id = doc.text("family"), doc.take("mask_id"), doc.take("eos_id")
    root = golden.root if (golden.root / "models" / family).is_dir() else golden.root.parent / "goldens"
    network = Golden(root, golden.device, golden.networks).network(f"models/{family}", family)
    spec = replace(network.spec, mask_id=mask_id, eos_id=eos_id, stop_ids=(eos_id,))
    samples, recorded = samples_of(doc), doc.items("passes")
    masks = [mask_of(name, doc, one, samples) for one in recorded]
    options = options_of(name, doc)
    found = passes(name, spec, samples, masks=masks, **options)
    if LIKELIHOODS.get(name).replays or name == "left_to_right":
        drawn = passes(name, spec, samples, **options)
        same("masks", *(sorted((int(n), *row.int().tolist()) for n, row in zip(each.sequence_M, each.masked_MT,
             strict=True)) for each in (found, drawn)))  # fmt: skip
    same("passes", len(recorded), len(found.sequence_M) + sum(not bool(mask.masked_T.any()) for mask in masks))
    for index, one in enumerate(recorded):
        if "scored" in one:
            place_X = found.place_X[found.pass_X == index] - found.prompt_N[found.sequence_M[index]]
            same(f"{one.where}.scored", [a for a, flag in enumerate(one.take("scored")) if flag], place_X.tolist())
    checked = check_policy(golden, network, found, [one.take("logps") for one in recorded], masks)
    expected = doc.fields("expected")
    scored = combine(found, checked, **({"positive": expected.take("positive")} if name == "spg" else {}))
    if "other_policy" in doc:
        other = policy(golden, root / "models" / family, family, golden.root / doc.text("other_policy"))
        second = combine(found, check_policy(golden, other, found, expected.take("other_policy_logps"), masks))
        result(golden, expected, "other_policy_sequence", second.sequence)
        for what in ("ratio", "log_ratio", "loss"):
            if what in expected:
                result(golden, expected, what, compare(found, scored, second))
    check_results(golden, name, expected, found, checked, scored)
    expected.finish()
    return f"{len(found.sequence_M)} passes, {len(found.place_X)} tokens"


def samples_of(doc: Fields) -> Samples:
    """The sequences of a case."""
    pairs = [(each.take("prompt"), each.take("answer")) for each in doc.items("sequences")]
    return Samples.of(pairs, steps=doc.take("step_maps", None) or doc.take("block_steps", None))


def options_of(name: str, doc: Fields) -> dict[str, Any]:
    """The options of the estimator. Those that only chose masks are left at their defaults."""
    params = doc.fields("params")
    known = {info.name for info in LIKELIHOODS.describe(name).options}
    found: dict[str, Any] = {}
    for key in list(doc.take("params")):
        value = params.take(key)
        if (own := NAMES.get(key, key)) in known and value is not None:
            found[own] = ORIGINS.get(value, value) if key == "origin" else max(value, 1) if key == "block" else value
    if name == "block_masking":
        found["pairs"] = params.take("method") == "coupled"
    params.finish()
    return found


def mask_of(name: str, doc: Fields, one: Fields, samples: Samples) -> Mask:
    """What is masked in a recorded pass, of texts that may stand twice in it."""
    n, tokens = one.take("sequence"), torch.tensor(one.take("tokens"))
    prompt, answer = int(samples.prompt_lengths[n]), int(samples.lengths[n])
    masked_T = tokens == doc.take("mask_id")
    if name in ("tracerl_block", "block_masking"):
        masked_T = torch.cat((torch.zeros(prompt, dtype=torch.bool), masked_T[prompt + answer :]))
    sample = one.take("iteration", None)
    sample = one.take("sample", one.take("time", None)) if sample is None else sample
    before = [int(each.take("sequence")) for each in doc.items("passes")]
    index = int(one.where.rpartition("[")[2].rstrip("]"))
    if sample is None:
        sample = before[:index].count(n) if name in ("elbo", "vrpo") else 0
    rate = doc.take("params")["rates"][sample] if name == "coupled" else 0.0
    scale = {"all": 1 / 2, "masked": rate and 1 / (2 * rate), "rest": 1 / (2 * (1 - rate))}.get(
        one.take("version", None), 1.0
    )
    return Mask(n, masked_T[: prompt + answer], sample, scale)


def check_policy(golden: Golden, network: Any, found: Passes, want: Any, masks: list[Mask]) -> Tensor:
    """The log-probabilities of a policy, compared where they are scored."""
    got = logps(network, found, batch_tokens=256)
    raw = logps(network, replace(found, options=found.options | {"temperature": 1.0})) if "temperature" in (
        found.options) else got  # fmt: skip
    kept = [row for row, mask in zip(want, masks, strict=True) if bool(mask.masked_T.any())]
    for m in range(len(found.sequence_M)):
        own_X = found.pass_X == m
        place_X = (found.place_X[own_X] - found.prompt_N[found.sequence_M[m]]).tolist()
        value = torch.tensor([kept[m][a] for a in place_X], dtype=torch.float64)
        golden.close(f"passes[{m}].logps", value, raw[own_X], atol=LOGP, rtol=LOGP)
    return got


def policy(golden: Golden, folder: Path, family: str, weights: Path) -> Any:
    """The network of a second policy: the configuration of the first one, with other weights."""
    with tempfile.TemporaryDirectory() as made:
        shutil.copy(folder / "config.json", made)
        shutil.copy(weights, Path(made, "model.safetensors"))
        known = Golden(Path(made)).family(".", family)
        return load_network(Path(made), known, dtype=torch.float32, device=golden.device)


def check_results(
    golden: Golden, name: str, expected: Fields, found: Passes, logp_X: Tensor, scored: Scored
) -> None:  # fmt: skip
    """All that the published code makes of the log-probabilities."""
    per_pass = logp_X.double().new_zeros(len(found.sequence_M)).index_add(
        0, found.pass_X.to(logp_X.device), found.weight_X.to(logp_X.device) * logp_X.double()
    )  # fmt: skip
    by_sequence = {"coupled": (1, 0), "diffu_grpo": (0, 1)}.get(name)
    sequence = scored.sequence if by_sequence is None else scored.per_sample.permute(by_sequence)
    tokens = scored.per_token[0]
    if by_sequence is not None:
        tokens = scored.per_token.permute(*by_sequence, 2)
    got = {
        "per_pass": per_pass, "sequence": sequence, "per_token": tokens, "per_sample": scored.per_sample.T,
        "counted": scored.counted, "answer_mask": found.counted_NA, **scored.more,
    }  # fmt: skip
    for what, value in got.items():
        if what in expected:
            result(golden, expected, what, value)


def result(golden: Golden, expected: Fields, what: str, value: Tensor) -> None:
    want = torch.tensor(expected.take(what), dtype=torch.float64)
    value = value.double().view(want.shape) if not want.dim() else value.double()  # of one sequence, a number
    golden.close(what, want, value, atol=RESULT, rtol=RESULT)
