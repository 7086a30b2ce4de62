"""Trains an adapter, or all weights, to fill masked blocks behind clean ones.

A conversation is fed clean, but for its last block, and behind it twice noised, where its answer is: a noised position
sees its own block and the clean blocks before it, a clean one its own block and those before (block diffusion,
arXiv:2503.09573). Conversations are packed side by side. Logits predict the next token, as the base's do, so the first
token of a block comes from the clean block before it (arXiv:2509.26328); or with `shift` 0 their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from tqdm import tqdm

from tools.convert_ar.base import LINEAR, Base, ConversionError, Layer, cast, hidden, masked_layer, visible, whole

STATE, PROGRESS = "state.safetensors", "state.json"
FREE = ("steps", "seconds", "save_every", "compile", "flex")  # settings that a run may go on with changed
COPIES = 2  # noised ones of each answer


@dataclass(frozen=True)
class Settings:
    """How a training run goes. The learning rate warms up for 50 steps and falls to a tenth."""

    steps: int = 4000
    seconds: float = math.inf  # where the run ends, if its steps have not
    batch: int = 24  # rows of `width` tokens a process, into which conversations are packed
    width: int = 2048
    length: int = 384  # of a conversation, at most
    blocks: tuple[int, ...] = (16, 32)  # process i trains with blocks[i % len(blocks)]; one process, with each in turn
    shift: int = 1  # logits predict the next token; 0: their own
    rate: float = 1e-3
    rank: int = 40  # of the adapter; 0: all weights are trained
    seed: int = 0
    paced: bool = False  # masks are those that the model itself would leave open
    certainty: float = 0.0  # weight of the entropy where the model is right (dParallel, arXiv:2509.26488)
    drafts: int = 0  # masks behind an anchor: only masks take the adapter, and draft for the base. 0: block diffusion
    masks: int = 3072  # of a row, in groups of `drafts`
    soft: float = 0.5  # the share of the loss of drafts that is against the base's whole distribution
    save_every: float = 60.0  # seconds
    compile: bool = True
    flex: bool = True  # on a card, attention leaves out what nothing sees


def _lines(path: Path, base: Base) -> Iterator[tuple[list[int], int]]:
    """Tokens of a conversation, and the index of its answer's first."""
    if not path.is_file():
        raise ConversionError(f"{path} is no file: give --text, or draw text from the base first")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                one = json.loads(line)
            except ValueError as error:
                raise ConversionError(f"{path}, line {number} is no JSON: {error}") from error
            try:
                yield _conversation(one, base)
            except ConversionError as error:
                raise ConversionError(f"{path}, line {number} {error}") from error


def _conversation(one: Any, base: Base) -> tuple[list[int], int]:
    if isinstance(one, dict) and "tokens" in one:
        ids, at, vocab = one["tokens"], one.get("answer"), base.model.config.vocab_size
        listed = isinstance(ids, list) and all(type(each) is int and 0 <= each < vocab for each in ids)
        if not listed or type(at) is not int:
            raise ConversionError(f'needs "tokens", ids below {vocab}, and "answer", the index of the answer\'s first')
        return ids, at
    one = one if isinstance(one, dict) else {}
    messages = one.get("messages") or [{"role": "user", "content": one.get("prompt")}]
    if not isinstance(messages, list) or not all(isinstance(said, dict) for said in messages):
        raise ConversionError('has "messages" that are no list of messages, each with "role" and "content"')
    last = messages[-1].get("content") if messages[-1].get("role") == "assistant" else None
    asked, answer = (messages, one["answer"]) if one.get("answer") else (messages[:-1], last)
    if not isinstance(answer, str) or not asked or not all(isinstance(said.get("content"), str) for said in asked):
        raise ConversionError("has no answer: give each line a prompt and an answer")
    try:
        text = base.tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # of the template, such as roles that do not take turns
        raise ConversionError(f"is refused by the base's chat template: {error}") from error
    ids, said = (base.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, answer))
    return ids + said + [base.chat.stop], len(ids)


@dataclass
class Texts:
    """Conversations as token ids, and where the answer of each begins."""

    rows: list[tuple[np.ndarray, int]]
    stop: int

    @classmethod
    def read(cls, paths: list[Path], base: Base, length: int) -> Texts:
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
        return cls([(np.array(ids, dtype=np.int64), answer) for ids, answer in rows], base.chat.stop)

    def layout(self, row: int, block: int, shift: int) -> np.ndarray | None:
        """A conversation as it is fed: a line of `FIELDS` each. int64 [F, T], T a multiple of `block`

        None if it was cut off in its first block. One that was cut off ends with its last whole block.
        """
        ids, answer = self.rows[row]
        first, end = answer // block * block, -(-len(ids) // block) * block
        if ids[-1] != self.stop:
            end = len(ids) // block * block
        if end <= answer:
            return None
        ids = np.concatenate([ids, np.full(max(end - len(ids), 0), self.stop)])
        noised = np.arange(first, end)
        place = np.concatenate([np.arange(end - block), *[noised] * COPIES])
        copy = np.repeat(np.arange(COPIES + 1), [end - block, *[end - first] * COPIES])
        own = np.arange(len(place)) - shift
        told = np.where((place % block == 0) & (shift == 1), place - shift, own).clip(0)
        return np.stack([ids[place], place, copy, (copy > 0) & (place >= answer), told])


FIELDS = ("token", "place", "copy", "open", "told", "doc")
"""Of a position that is fed: its token, its place in the conversation, 0 or which noised copy it is in, whether it is
of an answer in a noised copy, where in the row the logits are that predict it, and which conversation it is of."""


def packed(texts: Texts, draws: np.random.Generator, block: int, settings: Settings) -> Tensor:
    """Rows full of conversations. int64 [F, B, T]"""
    rows = np.zeros((len(FIELDS), settings.batch, settings.width), dtype=np.int64)
    rows[FIELDS.index("doc")] = -1
    used, misses, doc = [0] * settings.batch, 0, 0
    while misses < 8:
        one = texts.layout(int(draws.integers(len(texts.rows))), block, settings.shift)
        size = settings.width + 1 if one is None else one.shape[1]
        row = next((i for i, full in enumerate(used) if full + size <= settings.width), None)
        if one is None or row is None:
            misses += 1
            continue
        at = slice(used[row], used[row] + size)
        one[FIELDS.index("told")] += used[row]
        rows[:-1, row, at], rows[-1, row, at] = one, doc
        used[row], doc = used[row] + size, doc + 1
    return torch.from_numpy(rows)


class Batch:
    """What `packed` made, on a device. All [B, T]. The tensors stay the same, so that compiled programs do."""

    def __init__(self, rows: int, width: int, block: int, device: torch.device) -> None:
        self.block = block
        self.fields = torch.zeros(len(FIELDS), rows, width, dtype=torch.long, device=device)
        self.token, self.place, self.copy, _, self.told, self.doc = self.fields
        self.own = torch.zeros_like(self.place)  # which block of the conversation
        self.open, self.lead = (torch.zeros(rows, width, dtype=torch.bool, device=device) for _ in "ab")
        self.sees = sight(self.doc, self.copy, self.own)

    def fill(self, rows: Tensor, shift: int) -> Batch:
        """With `shift`, `lead` are the first positions of blocks: the clean block before predicts and decodes them."""
        self.fields.copy_(rows)
        self.own.copy_(self.place // self.block)
        self.open.copy_(self.fields[FIELDS.index("open")] > 0)
        self.lead.copy_(self.open & (self.place % self.block == 0) & (shift > 0))
        return self

    def seen(self, dtype: torch.dtype, *, flex: bool) -> Any:
        """For `hidden`: of flex attention on a card, else a mask that is added."""
        (rows, width), device = self.token.shape, self.token.device
        if flex and device.type == "cuda":
            return create_block_mask(self.sees, rows, None, width, width, device, _compile=True)
        places, row = torch.arange(width, device=device), torch.arange(rows, device=device)
        return visible(self.sees(row[:, None, None], places, places[:, None], places), dtype)


def sight(doc: Tensor, copy: Tensor, own: Tensor) -> Any:
    """Whether a query sees a key, as flex attention asks it. All [B, T]"""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        noised = (copy[row, query] == copy[row, key]) & (own[row, query] == own[row, key])
        clean = (copy[row, key] == 0) & (own[row, key] < own[row, query])
        return (doc[row, query] == doc[row, key]) & (noised | clean)

    return sees


def masks(open_NK: Tensor) -> Tensor:
    """A draw of what is masked in blocks: half of them uniformly, the others mostly behind a prefix. bool [N, K]

    The latter is what decoding meets. Each block with an open position has at least one mask.
    """
    (blocks, block), device = open_NK.shape, open_NK.device
    one = (blocks, 1)
    uniform = torch.rand(open_NK.shape, device=device) < torch.rand(one, device=device)
    behind = torch.arange(block, device=device) >= torch.randint(block, one, device=device)
    behind &= torch.rand(open_NK.shape, device=device) >= 0.4 * torch.rand(one, device=device)
    found = torch.where(torch.rand(one, device=device) < 0.5, uniform, behind)
    least = torch.rand(open_NK.shape, device=device).masked_fill(~open_NK, -1).argmax(-1, keepdim=True)
    found |= torch.arange(block, device=device) == least
    return found & open_NK


def weights_of(masked_NK: Tensor) -> Tensor:
    """Less for masks that have many masks before them in their block, which nobody can know. float [N, K]"""
    return (0.92 ** (masked_NK.cumsum(-1) - 1).clamp(min=0).float()).clamp(min=0.25)


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
        blocks = () if settings.drafts else settings.blocks
        self.batches = {block: Batch(settings.batch, settings.width, block, base.device) for block in blocks}

    def pack(self, texts: Texts, draws: np.random.Generator, step: int) -> Any:
        """What a step is fed, on the host."""
        return packed(texts, draws, self.block(step), self.settings)

    def filled(self, rows: Any, step: int) -> Any:
        """The same on the device."""
        return self.batches[self.block(step)].fill(rows, self.settings.shift)

    def block(self, step: int) -> int:
        blocks = self.settings.blocks
        return blocks[(self.me if self.ranks >= len(blocks) else step) % len(blocks)]

    def scores(self, batch: Batch, masked_BT: Tensor, wanted_BT: Tensor, seen: Any) -> Tensor:
        """Logits that predict the tokens at `wanted`. [M, V]"""
        noised = torch.where(masked_BT, self.base.chat.mask, batch.token)
        h = hidden(self.base, self.layers, noised, batch.place, seen, self.layer)
        row, place = wanted_BT.nonzero(as_tuple=True)
        return h[row, batch.told[row, place]] @ self.base.head().to(h.dtype).T

    @torch.no_grad()
    def left_open(self, batch: Batch, masked_BT: Tensor, seen: Any) -> Tensor:
        """The masks that the model would not fill in a forward, by a threshold that is drawn for each block."""
        logits = self.scores(batch, masked_BT, masked_BT, seen).float()
        sure = torch.zeros(masked_BT.shape, device=logits.device)
        sure[masked_BT] = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        masked, sure = masked_BT.view(-1, batch.block), sure.view(-1, batch.block)
        kept = masked & (sure < 0.4 + 0.5 * torch.rand(len(sure), 1, device=sure.device))
        return torch.where(kept.any(1, keepdim=True), kept, masked).view_as(masked_BT)

    def loss(self, batch: Batch) -> Tensor:
        settings = self.settings
        seen = batch.seen(self.base.dtype, flex=settings.flex)
        masked = masks((batch.open & ~batch.lead).view(-1, batch.block)).view_as(batch.open)
        if settings.paced:
            masked = self.left_open(batch, masked, seen)
        wanted = masked | batch.lead
        logits, tokens = self.scores(batch, masked, wanted, seen).float(), batch.token[wanted]
        weight = weights_of(masked.view(-1, batch.block)).view_as(masked)[wanted]
        loss = (F.cross_entropy(logits, tokens, reduction="none") * weight).sum() / weight.sum()
        if settings.certainty:
            logs = logits.log_softmax(-1)
            entropy = -(logs.exp() * logs).sum(-1) * (logits.argmax(-1) == tokens)
            loss = loss + settings.certainty * (entropy * weight).sum() / weight.sum()
        return loss

    def advance(self, batch: Batch, done: float) -> Tensor:
        """One step of the optimizer. `done`: the share of the run that is over."""
        rate = self.settings.rate * min(1, (self.step + 1) / 50) * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(batch)
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
        settings = self.settings
        draws = np.random.default_rng((settings.seed, self.me, self.step))
        torch.manual_seed(settings.seed * 1013 + self.me + self.step)
        begun, saved, spent = time.monotonic(), time.monotonic(), self.spent
        bar = tqdm(total=settings.steps, initial=self.step, desc="training", disable=self.me > 0, mininterval=10)
        with ThreadPoolExecutor(1) as ahead:  # packs the next step's conversations
            due = ahead.submit(self.pack, texts, draws, self.step)
            while (done := max(self.step / settings.steps, self.spent / settings.seconds)) < 1:
                batch = self.filled(due.result(), self.step)
                due = ahead.submit(self.pack, texts, draws, self.step + 1)
                loss = self.advance(batch, done)
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
        told = {"step": self.step, "spent": self.spent, "run": self.identity()}
        with whole(self.out / PROGRESS) as progress, whole(self.out / STATE) as state:
            save_file({name: one.contiguous() for name, one in tensors.items()}, state)
            progress.write_text(json.dumps(told))

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on: the base, and settings but those of how long and how fast."""
        some = self.base.table()[:64].detach().float().cpu().numpy().tobytes()
        own = {name: value for name, value in asdict(self.settings).items() if name not in FREE}
        return own | {"blocks": list(self.settings.blocks), "base": hashlib.sha256(some).hexdigest()[:16]}

    def resume(self, state: Path, *, weights_only: bool = False) -> None:
        """Goes on from a run's state, or begins a new run with its weights, or with those of an adapter.

        Raises ConversionError for a folder that has neither, for weights of other shapes, and for another run's state.
        """
        path, told = state / STATE, dict[str, Any]()
        if not weights_only:
            told, mine = json.loads((state / PROGRESS).read_text()), self.identity()
            if other := [name for name, one in told.get("run", {}).items() if mine.get(name) != one]:
                name = "base" if other[0] == "base" else f"--{other[0].replace('_', '-')}"
                raise ConversionError(f"{state} holds a run with another {name}: give that, or another folder as OUT")
        stored = weights_only and not path.is_file()
        tensors = stored_weights(state) if stored else load_file(path, device=str(self.base.device))
        wrong = [name for name, one in self.parameters.items() if _shape(tensors, name) != one.shape]
        if wrong or (stored and len(tensors) != len(self.parameters)):
            raise ConversionError(f"--weights {state} does not fit this base and --rank {self.settings.rank}")
        with torch.no_grad():
            for name, one in self.parameters.items():
                one.copy_(tensors[f"weight.{name}"])
        if weights_only:
            return
        self.step, self.spent = told["step"], told["spent"]
        for name, one in self.parameters.items():
            kinds = {kind: tensors[f"{kind}.{name}"] for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[one] = {"step": torch.tensor(float(self.step), device=one.device), **kinds}


def _shape(tensors: dict[str, Tensor], name: str) -> Any:
    found = tensors.get(f"weight.{name}")
    return None if found is None else found.shape


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """An adapter in PEFT's format as a run's state has it, in float32. Raises ConversionError without one."""
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not (config.is_file() and file.is_file()):
        raise ConversionError(f"--weights {folder} has neither {STATE} of a run nor an adapter")
    said = json.loads(config.read_text())
    factor = math.sqrt(2 * said["r"] / said["lora_alpha"])  # what values in float8 were multiplied with
    tensors = load_file(file).items()
    return {f"weight.{name.removesuffix('.weight')}.default.weight": one.float() / factor for name, one in tensors}


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
