"""Trains an adapter with which a model in the box writes its answers as JSON: {"steps": [...], "answer": N}.

The network is its own teacher. It reads a solution as the lines that it was trained on, with some tokens masked, and
the adapter is trained to say the same of the same tokens in the JSON. Braces, keys and quotes are their own targets.

    python -m tools.json_tiny tiny OUT --device cuda --batch 256 --seconds 600
    python -m tools.json_tiny tiny OUT --seconds 1200   # 16 problems a step on a CPU

OUT gets adapter_config.json, adapter_model.safetensors and training.json.

Shape suffixes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import dinfer  # registers the families
from dinfer.demo.problems import Problem, stream
from dinfer.layers.transformer import Transformer
from dinfer.loading.checkpoint import load_network
from dinfer.loading.hub import locate
from dinfer.loading.plan import family_of, read_config
from tools.distill_tiny import PATTERNS, sees
from tools.low_rank import LowRank
from tools.states import blocks_of
from tools.tiny_data import FAMILY_TURNS, WordEncoder
from tools.tiny_step import Whole
from tools.trained_experts import trainable
from tools.training import parsed, prepare, write_record

BLOCK = 32  # of decoding


@dataclass(frozen=True, slots=True)
class Options:
    """The hyper-parameters of a run. Every field is an option of the command line."""

    rank: int = 12
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 40
    clip: float = 1.0
    seconds: float = 1_200.0
    seed: int = 0
    device: str = "cpu"
    tail: int = 16  # stop tokens behind an answer


class Texts:
    """Solutions as the network writes them, and as JSON, with the place of each token of the one in the other."""

    def __init__(self, tokenizer: Tokenizer, file: Path) -> None:
        self.encode, self.tokenizer = WordEncoder(str(file)), tokenizer
        self.user, self.assistant, self.eos = (
            tokenizer.token_to_id(token) for token in ("<|user|>", "<|assistant|>", "<|endoftext|>")
        )
        self.line, self.quote = self.encode("\n")[0], self.encode('"')[0]

    def pair(self, problem: Problem) -> tuple[list[int], list[int], list[int], list[int]]:
        """The prompt, the solution, the JSON, and the place of each of its tokens in the solution; -1: none."""
        *steps, _ = problem.solution.split("\n")
        answer = problem.answer if problem.answer.isdigit() else f'"{problem.answer}"'
        own, said, place = [], list(self.encode('{"steps": ["')), []
        place += [-1] * len(said)
        for index, step in enumerate(steps):
            ids = self.encode(step)
            said += [*ids, self.quote]
            place += range(len(own), len(own) + len(ids) + 1)  # the quote stands for the line's end
            own += [*ids, self.line]
            between = self.encode(', "' if index < len(steps) - 1 else '], "answer": ')
            said += between
            place += [-1] * len(between)
        label, ids = self.encode("Answer: "), self.encode(problem.answer)
        place[-len(between)] = len(own)  # the list's end stands for "Answer"
        place[-2:] = [len(own) + 1, len(own) + 2]
        if not problem.answer.isdigit():
            said, place = [*said, self.quote], [*place, -1]
        said += ids
        place += range(len(own) + len(label), len(own) + len(label) + len(ids))
        own += [*label, *ids]
        rest = self.encode("}" if problem.answer.isdigit() else '"}')
        said, place = said + rest, place + [-1] * len(rest)
        whole = self.tokenizer.encode('{"steps": ' + json.dumps(steps) + f', "answer": {answer}}}')
        if said != whole.ids:
            raise ValueError(f"the parts of {problem.solution!r} do not encode as the whole")
        return [self.user, *self.encode(problem.question), self.assistant], own, said, place


def batches(texts: Texts, options: Options) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Solutions [B, T], JSON [B, T], the place of each token of the latter in the former [B, T], prompts' lengths [B].

    Rows of about one length come together.
    """
    source = stream("train", options.seed + 5_000, FAMILY_TURNS)
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        found = sorted(
            (texts.pair(problem) for problem in islice(source, 16 * options.batch)), key=lambda x: len(x[0] + x[2])
        )
        for at in torch.randperm(16, generator=generator).tolist():
            rows = found[at * options.batch : (at + 1) * options.batch]
            length = max(len(prompt) + len(said) for prompt, _, said, _ in rows) + options.tail
            own_BT, said_BT = (torch.full((len(rows), length), texts.eos) for _ in range(2))
            place_BT = torch.full((len(rows), length), -1)
            for row, (prompt, own, said, place) in enumerate(rows):
                first = len(prompt)
                own_BT[row, : first + len(own)] = torch.tensor(prompt + own)
                said_BT[row, : first + len(said)] = torch.tensor(prompt + said)
                place_BT[row, :first] = torch.arange(first)
                place_BT[row, first : first + len(said)] = torch.tensor([x + first if x >= 0 else -1 for x in place])
                end = first + len(said)
                place_BT[row, end:] = torch.arange(length - end) + first + len(own)
            yield own_BT, said_BT, place_BT, torch.tensor([len(row[0]) for row in rows])


def masks(prompt_B: Tensor, length: int, generator: torch.Generator, only_blockwise: bool) -> Tensor:
    """Rows are masked from a block on and in part within it, and some in part everywhere. bool [B, T]"""

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    rows = len(prompt_B)
    place_BT = torch.arange(length) - prompt_B[:, None]
    block_BT = place_BT.div(BLOCK, rounding_mode="floor")
    at_B1 = (rand(rows, 1) * (length - prompt_B[:, None]).div(BLOCK)).floor()
    ratio_B1 = rand(rows, 1).clamp_min(0.05)
    some_BT = rand(rows, length) < ratio_B1
    blockwise_BT = (block_BT > at_B1) | ((block_BT == at_B1) & some_BT)
    return (place_BT >= 0) & torch.where(rand(rows, 1) < (1.0 if only_blockwise else 0.6), blockwise_BT, some_BT)


class Lesson:
    """A network with an adapter, and its own base as the teacher."""

    def __init__(
        self, model: Transformer, teacher: Transformer, adapter: LowRank, texts: Texts, options: Options
    ) -> None:
        self.model, self.teacher, self.adapter, self.texts, self.options = model, teacher, adapter, texts, options
        self.adam = torch.optim.AdamW(adapter.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(options.seed)

    def logits(self, model: Transformer, shown_BT: Tensor, prompt_B: Tensor) -> Tensor:
        """The network's logits. [B, T, V]"""
        spec, length = model.spec, shown_BT.shape[1]
        causal = spec.causal_block is not None
        seen_BTT = sees(blocks_of(spec, prompt_B, length, spec.causal_block)) if causal else None
        pos_BT = torch.arange(length, device=shown_BT.device).expand_as(shown_BT)
        with torch.autocast(shown_BT.device.type, torch.bfloat16):
            return model.logits(model(model.embed(shown_BT), Whole(pos_BT, seen_BTT))).float()

    def loss(self, own_BT: Tensor, said_BT: Tensor, place_BT: Tensor, prompt_B: Tensor) -> Tensor:
        mask_id, length = self.model.spec.mask, said_BT.shape[1]
        device, causal = self.model.device, self.model.spec.causal_block is not None
        masked_BT = masks(prompt_B, length, self.generator, only_blockwise=causal).to(device)
        own_BT, said_BT, place_BT, prompt_B = (x.to(device) for x in (own_BT, said_BT, place_BT, prompt_B))
        from_BT, line, quote = place_BT.clamp_min(0), self.texts.line, self.texts.quote
        own_there_BT = own_BT.gather(1, from_BT)
        alike_BT = (own_there_BT == said_BT) | ((own_there_BT == line) & (said_BT == quote))
        taught_BT = (place_BT >= 0) & alike_BT
        # The teacher sees what the student sees.
        hidden_BT = torch.ones_like(masked_BT).scatter_(1, torch.where(place_BT >= 0, place_BT, length - 1), masked_BT)
        hidden_BT &= torch.arange(length, device=device) >= prompt_B[:, None]
        with torch.no_grad():
            teacher_BTV = self.logits(self.teacher, own_BT.masked_fill(hidden_BT, mask_id), prompt_B)
            teacher_BTV[..., mask_id] = -torch.inf
            swap = torch.arange(teacher_BTV.shape[-1], device=device)
            swap[[line, quote]] = swap[[quote, line]]
            wanted_BTV = teacher_BTV[..., swap].softmax(-1).gather(1, from_BT[..., None].expand_as(teacher_BTV))
        sure_BTV = F.one_hot(said_BT, teacher_BTV.shape[-1]).float()
        target_BTV = torch.where(taught_BT[..., None], wanted_BTV, sure_BTV)
        said_BTV = self.logits(self.model, said_BT.masked_fill(masked_BT, mask_id), prompt_B).log_softmax(-1)
        loss_BT = -(target_BTV * said_BTV).sum(-1)
        return (loss_BT * masked_BT).sum() / masked_BT.sum().clamp_min(1)

    def step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor], rate: float) -> float:
        """One step at a learning rate; returns the loss."""
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adapter.merge()
        loss = self.loss(*batch)
        loss.backward()
        self.adapter.pull()
        torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), self.options.clip)
        self.adam.step()
        return loss.item()


def train(lesson: Lesson, options: Options) -> dict[str, object]:
    """Trains for the seconds given, and returns the record."""
    began, curve, done, losses = time.perf_counter(), [], 0, []
    for batch in batches(lesson.texts, options):
        share = (time.perf_counter() - began) / options.seconds
        if share >= 1:
            break
        rate = options.learning_rate * min(1.0, (done + 1) / options.warmup) * 0.5 * (1 + math.cos(math.pi * share))
        losses.append(lesson.step(batch, rate))
        done += 1
        if done % 20 == 0:
            curve.append((done, round(sum(losses) / len(losses), 4)))
            losses.clear()
            print(*curve[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    lesson.adapter.merge()
    return {"steps": done, "seconds": round(time.perf_counter() - began, 1), "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model in the box")
    parser.add_argument("out", type=Path)
    parser.add_argument("--start-from", type=Path, help="folder of an adapter to go on from (default: none)")
    given, options = parsed(parser, Options)
    prepare(options.seed)
    folder = locate(given["model"])
    device = torch.device(options.device)
    family = dinfer.MODELS.build({"name": family_of(read_config(folder)), "checkpoint": given["model"]})
    model, teacher = (trainable(load_network(folder, family, dtype=torch.float32, device=device)) for _ in range(2))
    teacher.requires_grad_(False)
    adapter = LowRank(model, family, PATTERNS[model.spec.family], options.rank, options.seed)
    if given["start_from"] is not None:
        adapter.load(given["start_from"])
    tokenizer_file = folder / "tokenizer.json"
    texts = Texts(Tokenizer.from_file(str(tokenizer_file)), tokenizer_file)
    done = train(Lesson(model, teacher, adapter, texts, options), options)
    adapter.save(given["out"], given["model"])
    write_record(given["out"] / "training.json", "tools.json_tiny", device, adapter.parameters(), options, done)


if __name__ == "__main__":
    main()
