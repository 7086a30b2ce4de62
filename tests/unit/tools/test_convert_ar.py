"""tools/convert_ar on models of two layers."""

import json
import random
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tools.convert_ar import __main__ as converting  # noqa: E402
from tools.convert_ar import base as bases  # noqa: E402
from tools.convert_ar import draw, measure  # noqa: E402
from tools.convert_ar import train as trains  # noqa: E402
from tools.convert_ar.__main__ import main  # noqa: E402
from tools.convert_ar.drafts import Drafter, packed_drafts, tokens_per_forward  # noqa: E402
from tools.convert_ar.train import Batch, Settings, Texts, adapt, masks, packed, stored_weights  # noqa: E402

TEMPLATE = "{% for m in messages %}[{{ m.content }}{% endfor %}]"
SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
    "initializer_range": 0.7, "eos_token_id": 1,
}  # fmt: skip


def write_base(folder: Path, kind: str) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = ["[", "]", "<|mask|>", *"abcdefghijklmnopqrstu"]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="u"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=["<|mask|>"])
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def folder(request: Any, tmp_path_factory: Any) -> Path:
    return write_base(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> Path:
    """For what does not depend on the family."""
    return write_base(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def base(folder: Path) -> bases.Base:
    return bases.load(folder, torch.device("cpu"), torch.float32)


def write_text(path: Path) -> Path:
    lines = [{"prompt": "abc", "answer": "defg" * 2}, {"prompt": "b", "answer": "hijk" * 2}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def likely(base: bases.Base, tokens: list[int]) -> list[int]:
    """What the model finds most likely behind each token, but for the mask."""
    logits = base.model(torch.tensor([tokens])).logits[0]
    logits[:, base.chat.mask] = -torch.inf
    return logits.argmax(-1).tolist()


def test_layers_are_those_of_transformers(base: bases.Base) -> None:
    tokens = torch.tensor([[3, 5, 7, 4, 9, 11]])
    wanted = base.model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    (found,) = bases.causal_scores(base, base.layers(), tokens.tolist(), 0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_sampler_begins_another_conversation_where_one_ended(base: bases.Base) -> None:
    """Answers are the most likely tokens, and rows are what the model computes for each alone."""
    torch.manual_seed(0)
    sampler = draw.Sampler(base, rows=3, length=24, temperature=0.0)
    draws = random.Random(0)
    drawn = sampler.conversations(lambda n: draw.openings(base, n, 24, draws, plain=True), every=3)
    for tokens, answer in islice(drawn, 12):
        opening = list(base.chat.after)
        assert tokens[0] == 0 and tokens[answer - len(opening) : answer] == opening and len(tokens) >= answer + 4
        assert len(tokens) == 24 or tokens.index(base.chat.stop, answer) == len(tokens) - 1
        assert tokens[answer:] == likely(base, tokens)[answer - 1 : -1]


def batch_of(rows: list[tuple[list[int], int]], block: int, shift: int) -> Batch:
    texts = Texts([(np.array(ids), answer) for ids, answer in rows], stop=1)
    settings = Settings(batch=2, width=32, length=8, shift=shift)
    return Batch(2, 32, block, torch.device("cpu")).fill(
        packed(texts, np.random.default_rng(0), block, settings), shift
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_what_is_packed_is_predicted_from_where_a_forward_alone_would(base: bases.Base, shift: int) -> None:
    """Logits of every noised block are those of a sequence of clean blocks and this one, whatever lies beside it."""
    batch = batch_of([([0, 5, 6, 1, 7, 8, 9, 3, 1], 4), ([0, 5, 1, 3, 4, 1], 3)], block=4, shift=shift)
    torch.manual_seed(0)
    masked = masks((batch.open & ~batch.lead).view(-1, 4)).view_as(batch.open)
    fed = torch.where(masked, base.chat.mask, batch.token)
    seen = batch.seen(torch.float32, flex=False)
    h = bases.hidden(base, base.layers(), fed, batch.place, seen, bases.masked_layer)
    checked = 0
    for row, at in (masked | batch.lead).nonzero().tolist():
        doc, place = batch.doc[row, at], int(batch.place[row, at])
        own = (batch.doc[row] == doc) & (batch.place[row] // 4 == place // 4) & (batch.copy[row] == batch.copy[row, at])
        before = (batch.doc[row] == doc) & (batch.copy[row] == 0) & (batch.place[row] < place // 4 * 4)
        ids = torch.cat([fed[row, before], fed[row, own]])[None]
        blocks = torch.arange(ids.shape[1]) // 4
        sight = bases.visible(blocks[:, None] >= blocks, torch.float32)
        alone = bases.hidden(base, base.layers(), ids, torch.arange(ids.shape[1]), sight, bases.masked_layer)
        torch.testing.assert_close(h[row, batch.told[row, at]], alone[0, place - shift], atol=1e-5, rtol=1e-4)
        checked += 1
    assert checked > 8


def test_each_open_block_has_a_mask_and_only_open_positions_do() -> None:
    open_NK = (torch.arange(12) >= 5).view(3, 4).repeat(64, 1)
    found = masks(open_NK)
    assert not (found & ~open_NK).any()
    assert found.any(-1)[open_NK.any(-1)].all()


def test_training_ends_where_it_would_have_after_a_stop_and_loads(folder: Path, tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text.jsonl"))
    common = [
        "--text", text, "--length", "32", "--blocks", "4", "--batch", "2", "--width", "112", "--rank", "2",
        "--device", "cpu", "--rate", "0.02", "--no-compile",
    ]  # fmt: skip
    out = tmp_path / "out"
    assert main(["train", str(folder), str(out), *common, "--steps", "20"]) == 0
    state = json.loads((out / "state.json").read_text())
    assert main(["train", str(folder), str(out), *common, "--steps", "60"]) == 0
    losses = [json.loads(line) for line in (out / "loss.jsonl").read_text().splitlines()]
    assert state["step"] == 20 and [line["step"] for line in losses] == [20, 40, 60]
    assert losses[-1]["loss"] < losses[0]["loss"]
    assert json.loads((out / "diffusion.json").read_text())["block_size"] == 4
    assert all(value.dtype == torch.float16 for value in load_file(out / "adapter_model.safetensors").values())


def test_an_adapter_that_changes_nothing_answers_as_its_base(folder: Path, base: bases.Base, tmp_path: Path) -> None:
    """At blocks of one token the engine decodes the base itself; float8 halves the file."""
    prompts = [[0, 4, 5, 1], [0, 6, 1]]
    args = ["train", str(folder), str(tmp_path), "--text", str(write_text(tmp_path / "text.jsonl")), "--rank", "2"]
    sizes = ["--length", "16", "--blocks", "4", "--batch", "1", "--width", "64", "--no-compile", "--device", "cpu"]
    assert main([*args, *sizes, "--steps", "1", "--float8"]) == 0
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {one.dtype for one in tensors.values()} == {torch.float8_e4m3fn}
    (tmp_path / "state.safetensors").rename(tmp_path / "state")
    trained, stored = load_file(tmp_path / "state"), stored_weights(tmp_path)  # what --weights begins with
    wrong = [name for name, one in stored.items() if not torch.allclose(one, trained[name], rtol=0.07, atol=2e-3)]
    assert not wrong and len(stored) == len(tensors)
    pipe = measure.loaded(folder, tmp_path, 4, 0.9)
    assert pipe.recipe.iteration.lead == 4
    assert pipe.generate_ids(prompts, max_new_tokens=9)[0].counts.forwards < 12
    alone = measure.loaded(folder, None, 1, mask=base.chat.mask)
    score = measure.scored(base, alone, prompts, 9)
    found = alone.generate_ids(prompts, max_new_tokens=9)
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer.ids == likely(base, prompt + answer.ids)[len(prompt) - 1 : -1]
    assert score["answers"] == 2 and score["nll"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": "nowhere"}, "neither a GGUF file nor a folder"),
        ({"text": '{"prompt": "a"}'}, "has no answer"),
        ({"text": "\n[1]"}, "line 2 has no answer"),
        ({"text": '{"messages": "a", "answer": "b"}'}, "no list of messages"),
        ({"text": '{"messages": [{"role": "assistant", "content": "b"}]}'}, "has no answer"),
        ({"text": '{"tokens": [0, 99, 1], "answer": 1}'}, "ids below 24"),
        ({"text": '{"tokens": [0, 9, 1]}'}, "the index of the answer's first"),
        ({"more": "--steps 0"}, "--steps 0 must be at least 1"),
        ({"more": "--rate nan"}, "--rate nan must be from 1e-09 to 1"),
        ({"more": "--thresholds 0.5 2"}, "--thresholds 2.0 must be from 1e-09 to 1"),
        ({"more": "--device tpu"}, "--device tpu is none of torch's"),
        ({"more": "--length 4000 --width 16000"}, "--length 4000 must be from 12 to 64, the positions of the base"),
        ({"text": '{"prompt": "a", "answer": "' + "b" * 99 + '"}'}, "no line has an answer that fits"),
        ({"more": "--weights nowhere"}, "--weights nowhere has neither state.safetensors of a run nor an adapter"),
        ({"width": "150"}, "must be a multiple"),
        ({"width": "64"}, "must be at least 108"),
        ({"more": "--drafts 3"}, "--blocks is of block diffusion"),
        ({"more": "--drafts 3 --masks 2"}, "--drafts 3 must be from 1 to --masks 2"),
        ({"more": "--drafts 3 --rank 0"}, "give --rank at least 1"),
        ({"more": "--drafts 3", "width": "16"}, "--width 16 must be at least --length 32"),
    ],
)
def test_bad_input_is_one_sentence(
    change: dict[str, str], said: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(change.get("text", '{"prompt": "a", "answer": "b"}') + "\n")
    args = ["train", change.get("base", str(llama)), str(tmp_path / "out"), "--text", str(text), "--blocks", "4"]
    args += ["--length", "32", "--width", change.get("width", "128"), "--rank", "2", "--steps", "1"]
    assert main([*args, "--device", "cpu", *change.get("more", "").split()]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("python -m")]
    assert said in error
    assert not [*(tmp_path / "out").glob("*")]


def spoilt(folder: Path, out: Path, file: str, text: bytes) -> Path:
    shutil.copytree(folder, out)
    (out / file).write_bytes(text)
    return out


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("model.safetensors", b"\x10\0\0\0\0\0\0\0{", "could not be read by transformers: "),
        ("chat_template.jinja", b"no question", "chat template must write a question and something behind it"),
        ("chat_template.jinja", b"{{ messages[0].content }}", "and something behind it"),
    ],
)
def test_a_base_that_is_spoilt_is_one_sentence(
    file: str, text: bytes, said: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = spoilt(llama, tmp_path / "base", file, text)
    assert main(["train", str(base), str(tmp_path / "out"), "--device", "cpu"]) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_stops_half_way_leaves_whole_files_and_is_gone_on_with(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations that were drawn before a stop stay; a full disk and an interrupt are one sentence each."""
    held = tmp_path / "out" / "held.jsonl"
    sizes = ["--length", "24", "--held", "4", "--rows", "2", "--conversations", "4", "--device", "cpu"]
    draws = ["draw", str(llama), str(held.parent), *sizes]
    real, said = draw.Sampler.conversations, {"stop": [KeyboardInterrupt()]}

    def broken(self: Any, *given: Any) -> Any:
        for number, one in enumerate(real(self, *given)):
            if number == 2 and said["stop"]:
                raise said["stop"].pop()
            yield one

    monkeypatch.setattr(draw.Sampler, "conversations", broken)
    monkeypatch.setattr(draw, "LEAST_KEPT", 1)
    assert main(draws) == 130 and "interrupted; what is in" in capsys.readouterr().err
    with (part := held.with_suffix(".part")).open("a") as file:
        file.write('{"tokens": [0')  # what a full disk leaves
    before = part.read_text().splitlines()[:-1]
    assert main(draws) == 0 and not part.exists()
    assert held.read_text().splitlines()[: len(before)] == before and len(held.read_text().splitlines()) == 4
    trained = ["train", str(llama), str(tmp_path / "b"), "--text", str(write_text(tmp_path / "t.jsonl"))]
    trained += ["--length", "32", "--blocks", "4", "--batch", "1", "--width", "112", "--rank", "2", "--no-compile"]
    trained += ["--steps", "1", "--device", "cpu"]
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patched:
        patched.setattr(trains, "save_file", lambda tensors, path, *more: (path.write_text("half"), raised(full)))
        assert main(trained) == 1
    assert "No space left on device; what is in" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["loss.jsonl"]
    assert main(trained) == 0
    assert main([*trained, "--steps", "2", "--rate", "0.1"]) == 1
    assert "holds a run with another --rate: give that" in capsys.readouterr().err
    monkeypatch.setattr(converting, "find_spec", lambda name: None)
    assert main(trained) == 1 and "pip install peft, or --rank 0" in capsys.readouterr().err


def raised(error: Exception) -> None:
    raise error


def test_a_gpt2_is_no_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_base(tmp_path, "llama")
    config = transformers.AutoConfig.for_model("gpt2", vocab_size=24, n_embd=8, n_layer=1, n_head=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert main(["train", str(folder), str(tmp_path / "out")]) == 1
    assert "model_type='gpt2' cannot be converted" in capsys.readouterr().err


def drafter_of(base: bases.Base, out: Path, **changes: Any) -> Drafter:
    settings = Settings(batch=2, width=32, length=16, drafts=3, masks=24, rank=2, compile=False, **changes)
    return Drafter(base, settings, out)


def test_a_mask_drafts_what_it_would_behind_its_clean_tokens_alone(folder: Path, tmp_path: Path) -> None:
    """Clean rows are the base's own, bit for bit; a group of masks is as if it stood alone behind its anchor."""
    base = bases.load(folder, torch.device("cpu"), torch.float32)
    texts = Texts([(np.array(ids), 4) for ids in ([0, 5, 6, 1, 7, 8, 9, 3, 1], [0, 9, 8, 1, 6, 5, 9, 7, 8, 1])], stop=1)
    plain = base.layers()
    adapt(base, 2)
    for name, one in base.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.3)
    drafter = drafter_of(base, tmp_path)
    drafter.filled(drafter.pack(texts, np.random.default_rng(0), 0), 0)
    seen = drafter.seen()
    known, pairs = drafter.known(seen[0])
    drafted = drafter.drafted(pairs, seen[1])
    place, anchor, group, _, told, trained = drafter.masks[:, 0]
    for one in group.unique():
        own = (group == one).nonzero()[:, 0]
        first, at = int(anchor[own[0]]), own[0]
        since = first - int(drafter.clean[1, 0, first])
        ids = drafter.clean[0, 0, since : first + 1]
        masked = torch.full((3,), base.chat.mask)
        places = torch.arange(len(ids) + 3)
        sight = bases.visible(places[:, None] >= places, torch.float32)
        alone = bases.hidden(
            base, plain, ids[None], places[: len(ids)], sight[: len(ids), : len(ids)], bases.masked_layer
        )
        torch.testing.assert_close(known[0, first], alone[0, -1], atol=1e-5, rtol=1e-4)
        gated = gated_hidden(base, torch.cat([ids, masked]), len(ids))
        torch.testing.assert_close(drafted[0, own], gated[len(ids) :], atol=1e-5, rtol=1e-4)
        assert place[at] == len(ids) and int(told[at]) == first + 1 and bool(trained[at])


def gated_hidden(base: bases.Base, ids: torch.Tensor, clean: int) -> torch.Tensor:
    """Hidden states of a causal forward in which rows from `clean` on take the adapter, by two forwards a layer."""
    places = torch.arange(len(ids))
    cos, sin = base.rotation(places)
    sight = bases.visible(places[:, None] >= places, torch.float32)
    x = torch.nn.functional.embedding(ids[None], base.table()).float()
    rows = (places >= clean)[None, :, None]
    for with_adapter in base.layers():
        without = {name: None if name.endswith(".a") else one for name, one in with_adapter.items()}
        shape, dtype = base.shape, torch.float32
        h = bases.norm(x, without["norm1"], shape[3])
        both = [bases.heads_of(h, w, cos, sin, shape) for w in (without, with_adapter)]
        q, k, v = (torch.where(rows[:, None], two, one) for one, two in zip(*both, strict=True))
        mixed = bases.mixed(q, k, v, sight).transpose(1, 2).flatten(2)
        outs = [bases.project(mixed, w, "o_proj") for w in (without, with_adapter)]
        x = x + torch.where(rows, outs[1], outs[0])
        x = torch.where(rows, bases.mlp(x, with_adapter, shape[3], dtype), bases.mlp(x, without, shape[3], dtype))
    return bases.norm(x, base.body.norm.weight, base.shape[3])[0]


def test_training_of_drafts_goes_on_after_a_stop_and_says_how_many_are_right(folder: Path, tmp_path: Path) -> None:
    text, out = str(write_text(tmp_path / "text.jsonl")), tmp_path / "out"
    common = [
        "--text", text, "--length", "32", "--batch", "2", "--width", "112", "--rank", "2", "--drafts", "3",
        "--masks", "60", "--device", "cpu", "--rate", "0.02", "--no-compile",
    ]  # fmt: skip
    assert main(["train", str(folder), str(out), *common, "--steps", "20"]) == 0
    assert main(["train", str(folder), str(out), *common, "--steps", "60"]) == 0
    losses = [json.loads(line) for line in (out / "loss.jsonl").read_text().splitlines()]
    assert [line["step"] for line in losses] == [20, 40, 60] and losses[-1]["loss"] < losses[0]["loss"]
    told = json.loads((out / "drafts.json").read_text())
    assert sum(told["matches"]) > 0 and told["tokens_per_forward_by_drafts"]["3"][1] > 1.5
    assert json.loads((out / "diffusion.json").read_text())["drafts"] == 3


def test_tokens_a_forward_counts_the_round_that_a_refused_draft_costs() -> None:
    """Two drafts: all right, then one right; three tokens, then two and, without drafts, one."""
    assert tokens_per_forward(torch.tensor([2, 1]), 2) == (6 / 3, 2.5)


def test_what_drafts_helped_to_write_is_the_base_s_own_text(folder: Path, tmp_path: Path) -> None:
    """Token by token and by drafts that were trained: the same tokens, in fewer forwards."""
    text, out = str(write_text(tmp_path / "text.jsonl")), tmp_path / "out"
    sizes = ["--length", "32", "--batch", "2", "--width", "112", "--rank", "8", "--masks", "60"]
    common = [*sizes, "--drafts", "3", "--text", text, "--device", "cpu", "--rate", "0.02", "--no-compile"]
    assert main(["train", str(folder), str(out), *common, "--steps", "60"]) == 0
    prompts = [[0, 3, 4, 5, 1], [0, 4, 1], [0, 9, 9, 1, 7]]
    plain = measure.loaded(folder, None, 1, mask=2).generate_ids(prompts, max_new_tokens=12)
    drafted = measure.drafting(folder, out, 4).generate_ids(prompts, max_new_tokens=12)
    assert [one.ids for one in drafted] == [one.ids for one in plain]
    assert sum(one.counts.forwards for one in drafted) < sum(one.counts.forwards for one in plain)
    (out / "held.jsonl").write_text(json.dumps({"tokens": [*prompts[0], 7, 1], "answer": 5}) + "\n")
    assert main(["measure", str(folder), str(out), *common, "--new", "12"]) == 0
    rows = json.loads((out / "scores.json").read_text())["scores"][1:]
    assert [row["stride"] for row in rows] == [2, 3, 4] and len({row["nll"] for row in rows}) == 1


def test_drafts_need_answers_of_two_tokens() -> None:
    """Shorter ones are left out; a text that has no others is refused."""
    settings = Settings(batch=2, width=32, drafts=3, masks=24)
    rows = [(np.array([0, 5, 1, 9]), 3), (np.array([0, 5, 1, 9, 1]), 3)]
    clean, masks = packed_drafts(Texts(rows, stop=1), np.random.default_rng(0), settings)
    assert not (clean[0] == 9).logical_and(clean[1] == 3)[:, :-1].logical_and(clean[0, :, 1:] != 1).any()
    assert set(masks[5].unique().tolist()) == {0, 1}
    with pytest.raises(bases.ConversionError, match="no answer of the text has two tokens"):
        packed_drafts(Texts(rows[:1], stop=1), np.random.default_rng(0), settings)
