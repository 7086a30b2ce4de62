"""Trains an adapter with which a model in the box decodes several blocks at once, on its own answers.

A round has two parts. The network answers fresh problems of the training split: in the first round as the base model,
one block after the other, later with the adapter and several open blocks. Then the adapter is trained to give these
answers from the states of `tools/states.py`. The problem's own solution replaces a wrong answer. The network's answer
depends only on the question, so the free choices of wording disappear, which cost a forward each.

    python -m tools.distill_tiny tiny OUT --block 32 --fit-seconds 300
    python -m tools.distill_tiny tiny-llada2 OUT --drafts 0.4 --moves 0.2 --fit-seconds 300

    python -m tools.distill_tiny tiny-llada2 OUT --start-from dinfer/demo/checkpoints/tiny-llada2-multi-block --rounds 1

OUT gets adapter_config.json, adapter_model.safetensors and training.json, which has the number of steps. A run with
`--steps` set to that number differs a little in the learning rates of its first 200 steps.

Shape suffixes: N rows of a round, B rows, D rows with drafts, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import dinfer  # registers the families
from dinfer.core.layers.transformer import Transformer
from dinfer.core.loading.checkpoint import family_of, load_network, read_config
from dinfer.core.loading.files import locate
from dinfer.core.models.family import ModelFamily
from tools.low_rank import LowRank
from tools.rollout import Rollout, answers
from tools.states import States, blocks_of
from tools.tiny_data import shards
from tools.tiny_step import Whole
from tools.trained_experts import trainable
from tools.training import capturable, parsed, prepare, write_record

PATTERNS = {
    "llada": r".*(_proj|attn_out|ff_out)",
    "llada2": r".*(query_key_value|dense|lm_head|shared_experts\.\w+|layers\.0\.mlp\.\w+)",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The hyper-parameters of a run. Every field is an option of the command line."""

    block: int = 0  # length of attention blocks from the prompt's end, for a bidirectional base (D2F); 0: the model's
    rank: int = 30
    rounds: int = 4
    rows: int = 32_768  # answers of a round
    steps: int = 8_000  # of all rounds
    batch: int = 256
    length: int = 160  # positions of a row; with moves a multiple of the attention block
    learning_rate: float = 1e-3
    warmup: int = 200
    clip: float = 1.0
    seed: int = 0
    drafts: float = 0.0  # share of the rows with drafts
    moves: float = 0.0  # share of the rows whose drafts have a token too many or too few
    threshold: float = 0.95  # of decoding in the first round
    later: float = 0.9  # of decoding in later rounds
    workers: int = 6
    fit_seconds: float = 0.0  # sets `steps` to the number that fits this time; 0: does not
    compile: bool = True
    graphs: bool = True
    device: str = "cuda"


def logits(model: Transformer, shown_BT: Tensor, seen_BTT: Tensor | None) -> Tensor:
    """The network's logits, with bfloat16 matrix products on a GPU. [B, T, V]"""
    pos_BT = torch.arange(shown_BT.shape[1], device=shown_BT.device).expand_as(shown_BT)
    with torch.autocast(shown_BT.device.type, torch.bfloat16, enabled=shown_BT.is_cuda):
        return model.logits(model(model.embed(shown_BT), Whole(pos_BT, seen_BTT)))


def losses(model: Transformer, shown_BT: Tensor, said_BT: Tensor, seen_BTT: Tensor | None) -> Tensor:
    """Cross-entropy at every position. float32 [B, T]"""
    logits_BTV = logits(model, shown_BT, seen_BTT)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), said_BT.flatten(), reduction="none").view_as(said_BT)


@torch.no_grad()
def best(model: Transformer, shown_BT: Tensor, seen_BTT: Tensor | None, barred_V: Tensor) -> tuple[Tensor, Tensor]:
    """The best token at every position that is not in `barred_V`, and its probability. [B, T] each"""
    logits_BTV = logits(model, shown_BT, seen_BTT).float().masked_fill(barred_V, -torch.inf)
    top_BT, token_BT = logits_BTV.max(-1)
    return token_BT, (top_BT - logits_BTV.logsumexp(-1)).exp()


def sees(block_BT: Tensor) -> Tensor:
    """Which positions see which: a block sees itself and the blocks before it. bool [B, T, T]"""
    return block_BT[:, :, None] >= block_BT[:, None, :]


class Distillation:
    """A network with an adapter, its training answers, and its optimizer."""

    def __init__(self, model: Transformer, family: ModelFamily, options: Options, tokenizer: Tokenizer) -> None:
        spec, device = model.spec, model.device
        self.model, self.options, self.spec = model, options, spec
        self.adapter = LowRank(model, family, PATTERNS[spec.family], options.rank, options.seed)
        self.generator = torch.Generator(device).manual_seed(options.seed)
        digits_X = torch.tensor([tokenizer.token_to_id(digit) for digit in "0123456789"], device=device)
        self.states = States(
            spec=spec, digits_X=digits_X, block=options.block or spec.causal_block or options.length,
            drafts=options.drafts, moves=options.moves, generator=self.generator,
        )  # fmt: skip
        self.answer_id = tokenizer.token_to_id("Answer")
        barred_V = torch.zeros(spec.vocab, dtype=torch.bool, device=device)
        barred_V[[spec.mask, *spec.moving_ids]] = True
        self.barred_V = barred_V
        compiled = (lambda f: torch.compile(f, dynamic=False)) if options.compile else (lambda f: f)
        self.losses, self.best = compiled(losses), compiled(best)
        self.rate = torch.zeros((), device=device)
        on_gpu = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            self.adapter.parameters(), lr=self.rate, betas=(0.9, 0.98), weight_decay=0.0,
            fused=on_gpu, capturable=on_gpu,
        )  # fmt: skip
        self.loss_sum = torch.zeros((), device=device)
        self.tokens_NT = torch.zeros(options.rows, options.length, dtype=torch.int16, device=device)
        self.step_NT = torch.zeros_like(self.tokens_NT)
        self.prompt_N = torch.zeros(options.rows, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.done = 0

    def answer(self, source: Iterator[tuple[Tensor, Tensor]], first: bool) -> dict[str, float]:
        """Fills the rows of a round, and returns the share of right answers and the mean steps of an answer.

        `first`: the base model answers.
        """
        options, spec, right, steps = self.options, self.spec, 0, 0
        rollout = Rollout(
            threshold=options.threshold if first else options.later, mask_id=spec.mask, eos_id=spec.eos_id,
            blocks=1 if first else 4,
        )  # fmt: skip
        self.adapter.merge()
        for at in range(0, options.rows, options.batch):
            tokens_BT, prompt_B = next(source)
            block_BT = blocks_of(spec, prompt_B, options.length, self.states.block)
            whole = first and spec.prompt_block  # the base model sees all
            seen_BTT = sees(torch.zeros_like(block_BT) if whole else block_BT)
            given_BT, step_BT, steps_B = rollout(
                lambda shown_BT, seen_BTT=seen_BTT: self.best(self.model, shown_BT, seen_BTT, self.barred_V),
                tokens_BT, prompt_B, block_BT,
            )  # fmt: skip
            got_BX, want_BX = (answers(x_BT, prompt_B, self.answer_id, spec.eos_id) for x_BT in (given_BT, tokens_BT))
            right_B = (got_BX == want_BX).all(1)
            draw_BT = torch.rand(step_BT.shape, device=step_BT.device, generator=self.generator)
            draw_BT = (draw_BT * (steps_B[:, None] + 1)).to(torch.int64).masked_fill(step_BT < 0, -1)
            part = slice(at, at + options.batch)
            self.tokens_NT[part] = torch.where(right_B[:, None], given_BT, tokens_BT).to(torch.int16)
            self.step_NT[part] = torch.where(right_B[:, None], step_BT, draw_BT).to(torch.int16)
            self.prompt_N[part] = prompt_B
            right, steps = right + int(right_B.sum()), steps + int(steps_B.sum())
        return {"right": right / options.rows, "steps": steps / options.rows}

    def loss(self, tokens_BT: Tensor, step_BT: Tensor, prompt_B: Tensor) -> Tensor:
        """The loss of some of the rows, with the adapter merged."""
        seen_BTT = sees(blocks_of(self.spec, prompt_B, self.options.length, self.states.block))
        shown_BT, said_BT, weight_BT = self.states(
            tokens_BT, prompt_B, step_BT,
            lambda shown_BT, rows: self.best(self.model, shown_BT[:rows], seen_BTT[:rows], self.barred_V),
        )  # fmt: skip
        return (self.losses(self.model, shown_BT, said_BT, seen_BTT) * weight_BT).sum()

    def _train(self) -> None:
        options = self.options
        draw_B = torch.rand(options.batch, device=self.model.device, generator=self.generator) * options.rows
        at_B = draw_B.long().clamp_max(options.rows - 1)
        self.adapter.merge()
        loss = self.loss(self.tokens_NT[at_B].long(), self.step_NT[at_B].long(), self.prompt_N[at_B])
        loss.backward()
        self.adapter.pull()
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), options.clip)
        self.adam.step()
        self.loss_sum += loss.detach()

    def step(self, rate: float) -> None:
        """One step at learning rate `rate`. Returns before the device is done."""
        self.rate.fill_(rate)
        self.done += 1
        if self.graph is not None:
            self.graph.replay()
        elif not self.options.graphs or self.done <= 3:
            self._train()
        else:
            self.graph = torch.cuda.CUDAGraph()
            self.graph.register_generator_state(self.generator)
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self._train()
            self.graph.replay()

    def mean_loss(self, steps: int) -> float:
        """The mean loss over `steps` steps since the last call. Waits for the device."""
        mean = self.loss_sum.item() / steps
        self.loss_sum.zero_()
        return mean


def problems(tokenizer_file: Path, options: Options, device: torch.device) -> Generator[tuple[Tensor, Tensor]]:
    """Batches of fresh problems with their solutions, int64 [B, T], and the lengths of the prompts, [B]."""
    for shard in shards(tokenizer_file, {options.length: 1}, options.seed + 1_000, options.batch, options.workers):
        for length, at in shard.order:
            part = slice(at, at + options.batch)
            batch = shard.parts[length]
            yield tuple(torch.from_numpy(x[part]).to(device).long() for x in (batch.tokens_BT, batch.prompt_B))


def train(work: Distillation, tokenizer_file: Path, base: bool) -> dict[str, object]:
    """Runs all rounds and returns their record. `base`: the base model answers in the first round."""
    options, began = work.options, time.perf_counter()
    source = problems(tokenizer_file, options, work.model.device)
    steps, rounds, curve = options.steps, [], []
    spent = {"answers": 0.0, "steps": 0.0}
    for turn in range(options.rounds):
        mark = time.perf_counter()
        rounds.append(work.answer(source, base and turn == 0))
        spent["answers"] += time.perf_counter() - mark
        print(f"round {turn}: {rounds[-1]} {time.perf_counter() - began:.0f} s", flush=True)
        mark, first = time.perf_counter(), work.done
        while work.done < steps * (turn + 1) // options.rounds:
            warm = min(1.0, (work.done + 1) / options.warmup)
            left = 0.5 * (1 + math.cos(math.pi * work.done / steps))
            work.step(options.learning_rate * warm * left)
            if work.done % 100 == 0:
                curve.append((work.done, round(work.mean_loss(100), 5)))
                if not math.isfinite(curve[-1][1]):
                    raise RuntimeError(f"the loss is {curve[-1][1]} at step {work.done}; lower --learning-rate")
            if work.done % 1000 == 0:
                print(f"step {work.done} loss {curve[-1][1]:.4f} {time.perf_counter() - began:.0f} s", flush=True)
            if options.fit_seconds and work.done == 100:
                mark, first = time.perf_counter(), work.done  # without the time of compilation
            if options.fit_seconds and work.done == 200:
                pace = (time.perf_counter() - mark) / (work.done - first)
                rest = options.fit_seconds - (time.perf_counter() - began)
                rest -= (options.rounds - 1) * spent["answers"] * 0.5
                steps = max(400, work.done + int(rest / pace))
                print(f"{steps} steps of {pace * 1000:.1f} ms fit", flush=True)
        spent["steps"] += time.perf_counter() - mark
    work.adapter.merge()
    source.close()
    return {"steps": work.done, "rounds": rounds, "seconds": round(time.perf_counter() - began, 1), "curve": curve}


def run(
    kind: type[Distillation], module: str, name: str, out: Path, options: Options, *, block: int = 0,
    start_from: Path | None = None,
) -> None:  # fmt: skip
    """Trains an adapter of a model in the box. `block`: of its attention; 0: the model's own."""
    prepare(options.seed)
    folder, device, own = locate(name), torch.device(options.device), {"block": block} if block else {}
    family = dinfer.MODELS.build({"name": family_of(read_config(folder)), "checkpoint": name, **own})
    model = trainable(load_network(folder, family, dtype=torch.float32, device=device))
    tokenizer_file = folder / "tokenizer.json"
    work = kind(model, family, options, Tokenizer.from_file(str(tokenizer_file)))
    if start_from is not None:
        work.adapter.load(start_from)
    with capturable(device):
        done = train(work, tokenizer_file, base=start_from is None)
    work.adapter.save(out, name)
    write_record(out / "training.json", module, device, work.adapter.parameters(), options, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model in the box")
    parser.add_argument("out", type=Path)
    parser.add_argument("--start-from", type=Path, help="folder of an adapter to go on from (default: none)")
    given, options = parsed(parser, Options)
    start_from = given["start_from"]
    run(
        Distillation, "tools.distill_tiny", given["model"], given["out"], options, block=options.block,
        start_from=start_from,
    )  # fmt: skip


if __name__ == "__main__":
    main()
