"""Log-likelihood cases: the masks are given, and what the network says of the tokens under them is compared."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dinfer.lab.likelihood import Mask, Samples, logps, passes
from tests.parity.compare import same
from tests.parity.golden import Case, Fields, Golden

FILES = "generation/**/*.json"


def takes(doc: Fields) -> bool:
    return "log_likelihood" in doc


def cases(golden: Golden, path: Path, doc: Fields) -> Iterator[Case]:
    yield Case(golden.name(path), partial(run, golden, doc))


def run(golden: Golden, doc: Fields) -> str:
    """Every masked token's -log p, each batch's loss, and the mean of these."""
    prompt, answer, mask_id, rtol = (doc.take(name) for name in ("prompt_ids", "answer_ids", "mask_id", "rtol"))
    network = golden.network(doc.text("model"), doc.text("family"))
    spec, text = replace(network.spec, mask_id=mask_id), Samples.of([(prompt, answer)])
    params, losses = doc.fields("params"), []
    guidance, size, samples = (params.take(name) for name in ("cfg_scale", "batch_size", "mc_num"))
    params.finish()
    close = partial(golden.close, atol=0.0)
    for batch in doc.items("batches"):
        masked_XT = torch.tensor(batch.take("masked_ids")) == mask_id
        rate_X = masked_XT[:, len(prompt) :].double().mean(1)
        close(f"{batch.where}.p_mask", torch.tensor(batch.take("p_mask")), rate_X, rtol=1e-6)
        masks = [Mask(0, masked_T, x) for x, masked_T in enumerate(masked_XT)]
        drawn = passes("elbo", spec, text, masks=masks, guidance=guidance)
        found = (-logps(network, drawn)).double().split(drawn.pass_X.bincount().tolist())
        close(f"{batch.where}.token_nll", torch.tensor(batch.take("token_nll")), torch.cat(found), rtol=rtol)
        losses.append(sum(float(nll_N.sum() / rate) for nll_N, rate in zip(found, rate_X, strict=True)) / len(found))
        close(f"{batch.where}.loss", torch.tensor(batch.take("loss")), torch.tensor(losses[-1]), rtol=rtol)
    same("mc_num", samples, size * len(losses))
    value = -sum(losses) / len(losses)
    close("log_likelihood", torch.tensor(doc.take("log_likelihood")), torch.tensor(value), rtol=rtol)
    return f"{value:.4f} nats"
