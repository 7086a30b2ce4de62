"""Turns an autoregressive Llama or Qwen checkpoint into a block-diffusion one.

    python -m tools.convert_ar run BASE OUT [--text FILE.jsonl]
    python -m tools.convert_ar draw|train|measure BASE OUT ...
    torchrun --nproc-per-node 4 -m tools.convert_ar draw|train BASE OUT ...

BASE is a folder or a GGUF file. OUT gets an adapter in PEFT's format, which `dinfer model=a2d` loads on BASE, or with
`--rank 0` a whole checkpoint. `draw` lets the base write the text; `train` trains, and goes on where it was broken off;
`measure` writes a table of tokens a forward and what the base says of the text. `run` does all of them, and
distils before it measures: `train --weights OUT --paced` is trained on masks that the model itself would leave open.
With `--drafts N` the base stays as it is: masks alone take the adapter, and draft N tokens that the base verifies.
One process does it; with torchrun, several train together, and each draws.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from tools.convert_ar import draw, measure
from tools.convert_ar.base import Base, ConversionError, load, whole
from tools.convert_ar.drafts import Drafter, held_matches, tokens_per_forward
from tools.convert_ar.train import COPIES, STATE, Settings, Texts, Trainer, adapt


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.convert_ar", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("run", "draw", "train", "measure"))
    parser.add_argument("base", type=Path, help="folder or GGUF file")
    parser.add_argument("out", type=Path, help="a folder: text, state, adapter and results")
    parser.add_argument("--text", type=Path, nargs="+", help="JSONL files; default: what `draw` wrote to OUT")
    parser.add_argument("--weights", type=Path, help="OUT of a run, or an adapter, whose weights to begin with")
    parser.add_argument("--mask", help="token that stands for what is open; default: one that texts do not have")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=1536, help="conversations drawn side by side")
    parser.add_argument("--conversations", type=int, default=100_000, help="to be drawn, by all processes")
    parser.add_argument("--draw-seconds", type=float, default=1200.0)
    parser.add_argument("--temperature", type=float, default=0.0, help="of answers that are drawn")
    parser.add_argument("--most-repeats", type=float, default=0.25, help="share of 4-grams; answers are cut before")
    parser.add_argument("--held", type=int, default=200, help="conversations to measure with, as they come")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer when measuring")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.0, 0.9, 0.7, 0.5], help="to measure")
    parser.add_argument("--float8", action="store_true", help="store the adapter in float8, half the size")
    for field in fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.name == "blocks":
            parser.add_argument(flag, type=int, nargs="+", default=list(Settings.blocks))
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    return parser


RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, math.inf), "seconds": (1e-3, math.inf), "batch": (1, math.inf), "length": (8, math.inf),
    "shift": (0, 1), "rate": (1e-9, 1), "rank": (0, math.inf), "certainty": (0, math.inf), "drafts": (0, math.inf),
    "soft": (0, 1), "save_every": (0, math.inf), "rows": (1, math.inf), "conversations": (1, math.inf),
    "draw_seconds": (1e-3, math.inf), "temperature": (0, math.inf), "most_repeats": (0, 1), "held": (1, math.inf),
    "new": (1, math.inf), "thresholds": (1e-9, 1),
}  # fmt: skip


def check_ranges(args: argparse.Namespace) -> None:
    """Raises ConversionError for a number that is out of its range, and for a device that is not here."""
    for name, (least, most) in RANGES.items():
        given = getattr(args, name)
        if wrong := [one for one in (given if isinstance(given, list) else [given]) if not least <= one <= most]:
            range_ = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise ConversionError(f"--{name.replace('_', '-')} {wrong[0]} must be {range_}")
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ConversionError(f"--device {args.device} is none of torch's: give cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConversionError(f"--device {args.device}: torch finds no card here: give --device cpu")
    if args.what in ("run", "train") and args.rank and find_spec("peft") is None:
        raise ConversionError("an adapter is trained by peft, which is not installed: pip install peft, or --rank 0")


def check_length(base: Base, args: argparse.Namespace) -> None:
    """Raises ConversionError for a length that has no room for an answer, or that the base has no positions for."""
    least = 2 * (len(base.chat.before) + len(base.chat.after)) + 8
    if not least <= args.length <= (most := base.model.config.max_position_embeddings):
        raise ConversionError(f"--length {args.length} must be from {least} to {most}, the positions of the base")


def settings_of(args: argparse.Namespace, **changes: Any) -> Settings:
    """Raises ConversionError for a length that is no multiple of each block, and for drafts that cannot be trained."""
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    made = Settings(**given | {"blocks": tuple(args.blocks)} | changes)
    if made.drafts:
        check_drafts(made)
        return made
    wrong = [block for block in made.blocks if block < 1 or made.width % block]
    if wrong:
        raise ConversionError(f"--width {made.width} must be a multiple of each of --blocks, of {wrong[0]} too")
    if made.width < (least := (1 + COPIES) * (made.length + max(made.blocks))):
        raise ConversionError(f"--width {made.width} must be at least {least}, for {1 + COPIES} copies of --length")
    return made


def check_drafts(made: Settings) -> None:
    """Raises ConversionError for what drafts cannot be trained with."""
    if not 0 < made.drafts <= made.masks:
        raise ConversionError(f"--drafts {made.drafts} must be from 1 to --masks {made.masks}, the masks of a row")
    if not made.rank:
        raise ConversionError("--drafts trains an adapter, which the base verifies: give --rank at least 1")
    if made.width < made.length:
        raise ConversionError(f"--width {made.width} must be at least --length {made.length}")
    blocks = {"blocks", "shift", "paced", "certainty"}
    given = [one.name for one in fields(Settings) if one.name in blocks and getattr(made, one.name) != one.default]
    if given:
        raise ConversionError(f"--{given[0]} is of block diffusion, which --drafts does not train: leave it out")


def write_drawn(base: Base, args: argparse.Namespace) -> None:
    """OUT/text-N.jsonl of this process, and the first one's OUT/held.jsonl."""
    me, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    held, text = args.out / "held.jsonl", args.out / f"text-{me}.jsonl"
    if me == 0 and not held.is_file():
        few = draw.Sampler(base, min(args.rows, 2 * args.held), args.length, args.temperature)
        draw.write_text(
            few, held, conversations_wanted=args.held, seconds=args.draw_seconds, seed=args.seed + 900_001, whole=True
        )
    if args.text or text.is_file():
        return
    kept = draw.write_text(
        draw.Sampler(base, args.rows, args.length, args.temperature), text, seed=args.seed * 64 + me,
        conversations_wanted=-(-args.conversations // ranks), seconds=args.draw_seconds, most_repeats=args.most_repeats,
    )  # fmt: skip
    if not kept:
        raise ConversionError("the base wrote no conversation that ends: give --length, or text of your own by --text")


def texts_of(args: argparse.Namespace) -> list[Path]:
    return args.text or sorted(args.out.glob("text-*.jsonl")) or [args.out / "text-0.jsonl"]


def train(base: Base, args: argparse.Namespace, settings: Settings, out: Path, start: Path | None) -> None:
    """Trains into a folder, going on where a run in it was broken off."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = (Drafter if settings.drafts else Trainer)(base, settings, out)
    if (out / STATE).is_file():
        trainer.resume(out)
    elif start is not None:
        trainer.resume(start, weights_only=True)
    trainer.run(Texts.read(texts_of(args), base, settings.length))
    if isinstance(trainer, Drafter):
        write_matches(trainer, args, out)
    if trainer.me == 0:
        write(base, out, settings, float8=args.float8)


def write_matches(drafter: Drafter, args: argparse.Namespace, out: Path) -> None:
    """OUT/drafts.json: how many drafts in a row are right on conversations that were held back."""
    held = args.out / "held.jsonl"
    paths = [held] if held.is_file() else texts_of(args)
    found = torch.cat([*held_matches(drafter, Texts.read(paths, drafter.base, drafter.settings.length), 16)])
    if drafter.me == 0:
        counts = torch.bincount(found, minlength=drafter.settings.drafts + 1).tolist()
        rates = {n: tokens_per_forward(found, n) for n in range(1, drafter.settings.drafts + 1)}
        told = {"step": drafter.step, "matches": counts, "tokens_per_forward_by_drafts": rates}
        write_json(out / "drafts.json", told)
        print(told, flush=True)


def write(base: Base, out: Path, settings: Settings, *, float8: bool) -> None:
    """The adapter, or the whole model, with the config.json that says how it decodes."""
    kind = base.model.config.model_type
    told = {"model_type": f"a2d-{kind}", "mask_token_id": base.chat.mask, "block_size": min(settings.blocks)}
    told |= {"eos_token_id": base.chat.stop, "shift": settings.shift}
    if settings.drafts:
        told |= {"block_size": 1, "shift": 1, "drafts": settings.drafts}
    with TemporaryDirectory(dir=out, prefix=".writing-") as made:  # what fails half-way leaves nothing in OUT
        folder = Path(made)
        if settings.rank:
            sizes = ("hidden_size", "num_hidden_layers", "vocab_size")
            told["base"] = {name: getattr(base.model.config, name) for name in sizes}
            write_adapter(base, folder, float8=float8)
        else:
            base.model.save_pretrained(folder)
            base.tokenizer.save_pretrained(folder)
            told = json.loads((folder / "config.json").read_text()) | told
            told.pop("quantization_config", None)
        write_json(folder / ("diffusion.json" if settings.rank else "config.json"), told)
        for file in folder.iterdir():
            file.replace(out / file.name)


def write_adapter(base: Base, folder: Path, *, float8: bool) -> None:
    """In PEFT's format. Matrices are in float16, or in float8 with one factor, that config and tensors share."""
    from peft import get_peft_model_state_dict

    # Without the embedding, which peft would look up in a repository of the base's name.
    tensors, config = get_peft_model_state_dict(base.model, save_embedding_layers=False), base.model.peft_config
    factor = 2.0 ** math.floor(math.log2(448 / max(float(one.abs().max()) for one in tensors.values())))
    factor, dtype = (factor, torch.float8_e4m3fn) if float8 else (1.0, torch.float16)
    narrow = {name: (one.detach().float() * factor).to(dtype).contiguous() for name, one in tensors.items()}
    save_file(narrow, folder / "adapter_model.safetensors", {"format": "pt"})
    named = Path(base.model.config._name_or_path).name
    own = {"base_model_name_or_path": named, "inference_mode": True}
    config = replace(config["default"], **own, lora_alpha=config["default"].lora_alpha / factor**2)
    config.save_pretrained(folder)


def write_json(path: Path, told: dict[str, Any]) -> None:
    with whole(path) as part:
        part.write_text(json.dumps(told, indent=1) + "\n")


def measured(base: Base, args: argparse.Namespace, out: Path) -> None:
    """OUT/scores.json of the conversations that were held back, by the engine."""
    if not (held := args.out / "held.jsonl").is_file():
        raise ConversionError(f"{held} is no file: `draw` writes it, prompts and answers to measure with")
    rows = [json.loads(line) for line in held.read_text().splitlines()]
    prompts = [row["tokens"][: row["answer"]] for row in rows]
    given = [row["tokens"][row["answer"] :][: args.new] for row in rows]
    table = [{"what": "text of the base", **measure.judged(base, prompts, given, [len(one) for one in given])}]
    told = out / "diffusion.json"
    drafts = json.loads(told.read_text()).get("drafts", 0) if told.is_file() else 0
    make: Any = measure.drafting if drafts else measure.loaded
    ways: list[dict[str, Any]] = [{"stride": stride} for stride in range(2, drafts + 2)]
    for way in ways or [{"block": block, "threshold": one} for block in args.blocks for one in args.thresholds]:
        pipe = make(args.base, out, **way, device=args.device)
        table.append(way | measure.scored(base, pipe, prompts, args.new))
        print({name: value for name, value in table[-1].items() if name != "samples"}, flush=True)
    write_json(out / "scores.json", {"command": sys.argv, "scores": table})


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = arguments().parse_args(argv)
    again = f"what is in {args.out} is whole: the same command goes on from it"
    if "RANK" in os.environ:
        args.device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device.startswith("cuda") else args.device
        if args.device.startswith("cuda"):
            torch.cuda.set_device(args.device)
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        check_ranges(args)
        settings, device = settings_of(args), torch.device(args.device)
        base = load(args.base, device, torch.bfloat16 if device.type == "cuda" else torch.float32, args.mask)
        check_length(base, args)
        args.out.mkdir(parents=True, exist_ok=True)
        if args.what == "run" or (args.what == "draw" and not args.text):
            write_drawn(base, args)
            barrier()
        if args.what == "draw":
            return 0
        torch.manual_seed(args.seed)
        if args.what != "measure":
            adapt(base, args.rank)
        if args.what == "train" or (args.what == "run" and settings.drafts):
            train(base, args, settings, args.out, args.weights)
            barrier()
        elif args.what == "run":
            train(base, args, settings, args.out / "first", None)
            barrier()
            paced = settings_of(args, paced=True, rate=args.rate / 2, steps=-(-args.steps // 2))
            train(base, args, paced, args.out, args.out / "first")
            barrier()
        if args.what in ("run", "measure"):
            try:
                measured(base, args, args.weights or args.out)
            except ValueError as error:  # of the engine, which loads what was written
                raise ConversionError(str(error)) from error
    except ConversionError as error:
        print(f"python -m tools.convert_ar: {error}", file=sys.stderr)
        return 1
    except (OSError, SafetensorError) as error:  # such as a full disk
        print(f"python -m tools.convert_ar: {error}; {again}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"python -m tools.convert_ar: interrupted; {again}", file=sys.stderr)
        return 130
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    sys.exit(main())
