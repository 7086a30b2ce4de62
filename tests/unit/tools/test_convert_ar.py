"""tools/convert_ar on models of two layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from tools.convert_ar import base as bases  # noqa: E402
from tools.convert_ar import draw, measure  # noqa: E402
from tools.convert_ar.__main__ import main  # noqa: E402
from tools.convert_ar.train import doubled, masks  # noqa: E402

TEMPLATE = "{% for m in messages %}[{{ m.content }}{% endfor %}]"
SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
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
def base(folder: Path) -> bases.Base:
    return bases.load(folder, torch.device("cpu"), torch.float32)


def write_text(path: Path) -> Path:
    lines = [{"prompt": "abc", "answer": "defg" * 2}, {"prompt": "b", "answer": "hijk" * 2}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_layers_are_those_of_transformers(base: bases.Base) -> None:
    tokens = torch.tensor([[3, 5, 7, 4, 9, 11]])
    wanted = base.model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    (found,) = bases.causal_scores(base, base.layers(), tokens.tolist(), 0)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_sampler_draws_what_the_model_finds_most_likely(base: bases.Base) -> None:
    sampler = draw.Sampler(base, rows=2, length=12, parts=3)
    forced = torch.full((2, 12), -1)
    forced[:, :3] = torch.tensor([[0, 5, 6], [0, 9, 3]])
    tokens = sampler.draw(forced, base.chat.stop, (1e-4, 1e-4))
    wanted = base.model(tokens).logits.argmax(-1)
    assert tokens[:, 3:].tolist() == wanted[:, 2:-1].tolist()


def test_a_noised_row_sees_its_block_and_clean_ones_before_it() -> None:
    seen = doubled(4, 2, torch.device("cpu"))
    assert seen.int().tolist()[2] == [0, 0, 1, 1, 1, 1, 0, 0]
    assert seen.int().tolist()[6] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_each_open_block_has_a_mask_and_only_open_positions_do() -> None:
    open_BL = torch.arange(12)[None].repeat(64, 1) >= 5
    found = masks(open_BL, 4)
    assert not (found & ~open_BL).any()
    assert found.unflatten(1, (3, 4)).any(-1)[:, 1:].all()


def test_training_ends_where_it_would_have_after_a_stop_and_loads(folder: Path, tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text.jsonl"))
    common = [
        "--text", text, "--length", "32", "--blocks", "4", "--batch", "4", "--rank", "2", "--no-compile",
        "--device", "cpu", "--rate", "0.02",
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


def test_answers_take_one_token_a_forward_or_all(base: bases.Base) -> None:
    layers, prompts = base.layers(), [[0, 4, 5, 1], [0, 6, 1]]
    one = measure.answers(base, layers, prompts, block=4, threshold=2.0, new=9)
    every = measure.answers(base, layers, prompts, block=4, threshold=0.0, new=9)
    assert [len(answer) for answer in one[0]] <= one[1]
    assert max(every[1]) <= 4
    score = measure.judged(base, prompts, *one)
    assert score["answers"] == 2 and score["nll"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base": "nowhere"}, "neither a GGUF file nor a folder"),
        ({"text": '{"prompt": "a"}'}, "has no answer"),
        ({"text": '{"prompt": "a", "answer": "' + "b" * 99 + '"}'}, "no line has an answer that fits"),
        ({"length": "30"}, "must be a multiple"),
    ],
)
def test_bad_input_is_one_sentence(
    change: dict[str, str], said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(change.get("text", '{"prompt": "a", "answer": "b"}') + "\n")
    args = ["train", change.get("base", str(folder)), str(tmp_path / "out"), "--text", str(text), "--blocks", "4"]
    assert main([*args, "--length", change.get("length", "32"), "--device", "cpu", "--rank", "2", "--steps", "1"]) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("python -m")]
    assert said in error
    assert not [*(tmp_path / "out").glob("*")]


def test_a_gpt2_is_no_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_base(tmp_path, "llama")
    config = transformers.AutoConfig.for_model("gpt2", vocab_size=24, n_embd=8, n_layer=1, n_head=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert main(["train", str(folder), str(tmp_path / "out")]) == 1
    assert "model_type='gpt2' cannot be converted" in capsys.readouterr().err
