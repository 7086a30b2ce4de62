"""Trains an adapter, or all weights, to fill masked blocks behind clean ones.

A sequence is fed twice, noised | clean, with one mask: a noised position sees its own block and the clean blocks
before it, a clean one its own block and those before (block diffusion, arXiv:2503.09573). The logits at a position
predict the token there. Only answers are noised.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from tools.convert_ar.base import LINEAR, Base, ConversionError, Layer, cast, hidden, masked_layer, visible

STATE, PROGRESS = "state.safetensors", "state.json"


@dataclass(frozen=True)
class Settings:
    """How a training run goes. The learning rate warms up for 50 steps and falls to a tenth."""

    steps: int = 2000
    seconds: float = math.inf  # where the run ends, if its steps have not
    batch: int = 64  # sequences a process
    length: int = 384
    blocks: tuple[int, ...] = (16, 32)  # process i trains with blocks[i % len(blocks)]; one process, with each in turn
    rate: float = 1e-3
    rank: int = 40  # of the adapter; 0: all weights are trained
    seed: int = 0
    paced: bool = False  # masks are those that the model itself would leave open
    certainty: float = 0.0  # weight of the entropy where the model is right (dParallel, arXiv:2509.26488)
    save_every: float = 60.0  # seconds
    compile: bool = True


@dataclass
class Texts:
    """Conversations of one length on a device."""

    tokens_BL: Tensor
    open_BL: Tensor  # answers, up to the end of the block that holds the stop token

    @classmethod
    def read(cls, paths: list[Path], base: Base, length: int, block: int) -> Texts:
        """From JSONL files whose lines have `tokens` and `answer`, or `prompt` and `answer` as text, or `messages`.

        Raises ConversionError if no line has an answer that fits.
        """
        rows = [row for path in paths for row in _lines(path, base)]
        rows = [row for row in rows if 0 < row[1] < len(row[0]) <= length]
        if not rows:
            raise ConversionError(
                f"{', '.join(map(str, paths))}: no line has an answer that fits into {length} tokens: give lines with "
                '"prompt" and "answer", or a larger --length'
            )
        tokens = torch.full((len(rows), length), base.chat.stop)
        ends, starts = (torch.tensor([pick(row) for row in rows])[:, None] for pick in (_end, lambda row: row[1]))
        for i, (ids, _) in enumerate(rows):
            tokens[i, : len(ids)] = torch.tensor(ids)
        places = torch.arange(length)[None]
        return cls(tokens, (places >= starts) & (places < -(-ends // block) * block))


def _end(row: tuple[list[int], int]) -> int:
    return len(row[0])


def _lines(path: Path, base: Base) -> Iterator[tuple[list[int], int]]:
    """Tokens of a conversation, and the index of its answer's first."""
    if not path.is_file():
        raise ConversionError(f"{path} is no file: give --text, or draw text from the base first")
    encode = lambda text: base.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                one = json.loads(line)
            except ValueError as error:
                raise ConversionError(f"{path}, line {number} is no JSON: {error}") from error
            if "tokens" in one:
                yield one["tokens"], one["answer"]
                continue
            messages = one.get("messages") or [{"role": "user", "content": one.get("prompt")}]
            answer = one.get("answer") or (messages.pop()["content"] if messages[-1]["role"] == "assistant" else None)
            if not isinstance(answer, str) or not all(isinstance(said.get("content"), str) for said in messages):
                raise ConversionError(f"{path}, line {number} has no answer: give each line a prompt and an answer")
            asked = encode(base.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
            yield asked + encode(answer) + [base.chat.stop], len(asked)


def doubled(length: int, block: int, device: torch.device) -> Tensor:
    """Which of noised | clean positions a row sees. bool [2L, 2L]"""
    q = torch.arange(length, device=device) // block
    own, before, upto = q[:, None] == q[None], q[:, None] > q[None], q[:, None] >= q[None]
    return torch.cat([torch.cat([own, before], 1), torch.cat([torch.zeros_like(own), upto], 1)])


def masks(open_BL: Tensor, block: int) -> Tensor:
    """A draw of what is masked: half of the blocks uniformly, the others mostly behind a prefix. bool [B, L]

    The latter is what decoding meets. Each block with an open position has at least one mask.
    """
    open_BNK = open_BL.unflatten(1, (-1, block))
    one, device = (*open_BNK.shape[:2], 1), open_BL.device
    uniform = torch.rand(open_BNK.shape, device=device) < torch.rand(one, device=device)
    behind = torch.arange(block, device=device) >= torch.randint(block, one, device=device)
    behind &= torch.rand(open_BNK.shape, device=device) >= 0.4 * torch.rand(one, device=device)
    found = torch.where(torch.rand(one, device=device) < 0.5, uniform, behind)
    least = torch.rand(open_BNK.shape, device=device).masked_fill(~open_BNK, -1).argmax(-1, keepdim=True)
    found |= torch.arange(block, device=device) == least
    return (found & open_BNK).flatten(1)


def weights_of(masked_BL: Tensor, block: int) -> Tensor:
    """Less for masks that have many masks before them in their block, which nobody can know. float [B, L]"""
    before = masked_BL.unflatten(1, (-1, block)).cumsum(-1).flatten(1) - 1
    return (0.92 ** before.float()).clamp(min=0.25)


class Trainer:
    """One process of a run."""

    def __init__(self, base: Base, settings: Settings, out: Path) -> None:
        self.base, self.settings, self.out = base, settings, out
        self.ranks, self.me = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.parameters = {name: one for name, one in base.model.named_parameters() if one.requires_grad}
        fused = base.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=fused
        )
        self.layers = cast(base.layers(), base.dtype)
        self.layer: Layer = torch.compile(masked_layer, dynamic=False) if settings.compile else masked_layer
        self.step, self.spent = 0, 0.0
        self.places = torch.arange(settings.length, device=base.device).repeat(2)
        self.seen = {
            block: visible(doubled(settings.length, block, base.device), base.dtype) for block in settings.blocks
        }

    def block(self) -> int:
        blocks = self.settings.blocks
        return blocks[(self.me if self.ranks >= len(blocks) else self.step) % len(blocks)]

    def scores(self, tokens_BL: Tensor, masked_BL: Tensor, block: int) -> Tensor:
        """Logits at masks. [M, V]"""
        noised = torch.where(masked_BL, self.base.chat.mask, tokens_BL)
        fed = torch.cat([noised, tokens_BL], 1)
        h = hidden(self.base, self.layers, fed, self.places, self.seen[block], self.layer)
        return h[:, : tokens_BL.shape[1]][masked_BL] @ self.base.head().to(h.dtype).T

    @torch.no_grad()
    def left_open(self, tokens_BL: Tensor, masked_BL: Tensor, block: int) -> Tensor:
        """The masks that the model would not fill in a forward, by a threshold that is drawn for each row."""
        logits = self.scores(tokens_BL, masked_BL, block).float()
        sure = torch.zeros(masked_BL.shape, device=logits.device)
        sure[masked_BL] = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        kept = masked_BL & (sure < 0.4 + 0.5 * torch.rand(len(sure), 1, device=sure.device))
        return torch.where(kept.any(1, keepdim=True), kept, masked_BL)

    def loss(self, tokens_BL: Tensor, open_BL: Tensor) -> Tensor:
        block = self.block()
        masked = masks(open_BL, block)
        if self.settings.paced:
            masked = self.left_open(tokens_BL, masked, block)
        logits, wanted = self.scores(tokens_BL, masked, block).float(), tokens_BL[masked]
        weight = weights_of(masked, block)[masked]
        loss = (F.cross_entropy(logits, wanted, reduction="none") * weight).sum() / weight.sum()
        if self.settings.certainty:
            logs = logits.log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1) * (logits.argmax(-1) == wanted)
            loss = loss + self.settings.certainty * (entropy * weight).sum() / weight.sum()
        return loss

    def advance(self, tokens_BL: Tensor, open_BL: Tensor, done: float) -> Tensor:
        """One step of the optimizer. `done`: the share of the run that is over."""
        rate = self.settings.rate * min(1, (self.step + 1) / 50) * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(tokens_BL, open_BL)
        loss.backward()
        if self.ranks > 1:
            grads = [one.grad for one in self.parameters.values() if one.grad is not None]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad) / self.ranks)
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.detach()

    def run(self, texts: Texts) -> None:
        """Trains to the end, and writes the loss to OUT/loss.jsonl."""
        settings, device = self.settings, self.base.device
        draws = torch.Generator().manual_seed(settings.seed * 1009 + self.me + self.step * 7919)
        torch.manual_seed(settings.seed * 1013 + self.me + self.step)
        begun, saved, spent = time.monotonic(), time.monotonic(), self.spent
        bar = tqdm(total=settings.steps, initial=self.step, desc="training", disable=self.me > 0, mininterval=10)
        while (done := max(self.step / settings.steps, self.spent / settings.seconds)) < 1:
            rows = torch.randint(len(texts.tokens_BL), (settings.batch,), generator=draws)
            loss = self.advance(texts.tokens_BL[rows].to(device), texts.open_BL[rows].to(device), done)
            bar.update()
            if self.step % 20 == 0 or self.step == settings.steps:  # processes agree on the time
                self.spent = self._agreed(spent + time.monotonic() - begun)
                self._log(loss, bar)
                if self.me == 0 and time.monotonic() - saved > settings.save_every:
                    self.save()
                    saved = time.monotonic()
        bar.close()
        if self.me == 0:
            self.save()

    def _agreed(self, seconds: float) -> float:
        if self.ranks == 1:
            return seconds
        told = torch.tensor([seconds], device=self.base.device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    def _log(self, loss: Tensor, bar: Any) -> None:
        if self.me == 0:
            bar.set_postfix(loss=f"{float(loss):.3f}")
            with (self.out / "loss.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "seconds": round(self.spent, 1), "loss": float(loss)}) + "\n")

    def save(self) -> None:
        """The run's state, whole or not at all."""
        tensors = {f"weight.{name}": one.detach() for name, one in self.parameters.items()}
        for name, one in self.parameters.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                if kind in self.optimizer.state[one]:
                    tensors[f"{kind}.{name}"] = self.optimizer.state[one][kind]
        save_file({name: one.contiguous() for name, one in tensors.items()}, self.out / f"{STATE}.part")
        (self.out / f"{STATE}.part").replace(self.out / STATE)
        (self.out / PROGRESS).write_text(json.dumps({"step": self.step, "spent": self.spent}))

    def resume(self, state: Path, *, weights_only: bool = False) -> None:
        """Goes on from a run's state, or begins a new run with its weights."""
        tensors = load_file(state / STATE, device=str(self.base.device))
        with torch.no_grad():
            for name, one in self.parameters.items():
                one.copy_(tensors[f"weight.{name}"])
        if weights_only:
            return
        told = json.loads((state / PROGRESS).read_text())
        self.step, self.spent = told["step"], told["spent"]
        for name, one in self.parameters.items():
            kinds = {kind: tensors[f"{kind}.{name}"] for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[one] = {"step": torch.tensor(float(self.step), device=one.device), **kinds}


def adapt(base: Base, rank: int) -> None:
    """Makes what is trained trainable: an adapter on all linear layers, or with rank 0 all weights."""
    if not rank:
        base.model.requires_grad_(True)
        base.table().requires_grad_(False)
        base.head().requires_grad_(False)
        return
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LINEAR), task_type=None)
    base.model = get_peft_model(base.model, config)
