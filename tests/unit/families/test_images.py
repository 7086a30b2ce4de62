"""Images in prompts: the tower against transformers' own, what a request computes and shares, what is refused."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.images import picture, png, save_seeing, seeing
from transformers.image_transforms import convert_to_rgb
from transformers.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion

import dinfer
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.request import Request
from dinfer.core.engine.runtime import Runtime
from dinfer.core.loading.files import CheckpointError
from dinfer.core.pipeline import Pipeline
from dinfer.core.ranks.split import WHOLE
from dinfer.core.step.cursors import Phase
from dinfer.families.abilities.embedded import Embedded, Embeddings, Stretch
from dinfer.families.images.eyes import eyes_of
from dinfer.families.images.gemma import GemmaEyes
from dinfer.families.images.pictures import opened
from dinfer.lab.inspect import inspect
from dinfer.scale.parallel.leader_worker import read, spelled
from dinfer.speed import memory
from tests.parity.kinds.images import hidden


@pytest.fixture(scope="module")
def theirs() -> DiffusionGemmaForBlockDiffusion:
    return seeing()


@pytest.fixture(scope="module")
def folder(theirs: DiffusionGemmaForBlockDiffusion, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing(theirs, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return dinfer.load(str(folder), device="cpu", iteration={"block": 6}, decoder={"steps": 4})


def asked(*images: Any, text: str = "w1 w2") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": "w5"}, *parts, {"type": "text", "text": text}]}]


def request_of(pipe: Pipeline, prompt: Any) -> Request:
    (request,) = pipe.requests([pipe.encode(prompt)], 12, {"seed": 3, "temperature": 0})
    return request


def answers(pipe: Pipeline, requests: list[Request], **settings: Any) -> list[list[int]]:
    """Canvases of requests that run one after the other."""
    engine, parts = Engine(pipe.recipe, Runtime(**settings)), []
    for request in requests:
        *_, last = engine.run([request])
        assert last.completion is not None
        parts.append(last.completion.canvas)
    return parts


def test_soft_tokens_are_those_of_transformers(theirs: DiffusionGemmaForBlockDiffusion, pipe: Pipeline) -> None:
    eyes = pipe.model.eyes
    for image in (picture(0), picture(1, 40, 3), picture(2, 1, 1), picture(3).convert("L")):
        given = opened(image, "it")
        pixels, places = eyes.prepared(given)
        want_XD = theirs.model.encoder.get_image_features(pixels, places).pooler_output
        got = eyes.see(given)
        assert torch.allclose(got.rows_XD, want_XD, atol=2e-5)
        assert len(got) == eyes.soft_tokens(given) <= 70


def test_a_step_sees_what_one_pass_over_prompt_and_canvas_does(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    request, network, made = request_of(pipe, asked(picture(0), picture(1))), pipe.model, []
    logits = network.logits
    monkeypatch.setattr(network, "logits", lambda h_BLD: made.append(logits(h_BLD)) or made[-1])
    next(one for one in Engine(pipe.recipe, Runtime()).run([request]) if one.phase == Phase.WINDOW)
    place_C = torch.arange(request.start, request.start + 6)
    canvas_BC = pipe.recipe.sampling.noise(torch.tensor([[3]]), place_C, torch.tensor(0), network.spec.vocab)
    ask = request.ask(Embedded)
    assert ask is not None and [one.mutual for one in ask.stretches] == ["local", "local"]
    with torch.inference_mode():
        prompt_BT = torch.tensor([request.prompt])
        whole, bare = (hidden(network, prompt_BT, canvas_BC, [one])[:, -6:] for one in (ask, Embedded(())))
        assert torch.allclose(made[0].view(1, 6, -1), logits(whole), atol=1e-4)
        assert not torch.allclose(logits(bare), logits(whole), atol=1e-1)


def test_pieces_pages_and_caches_change_no_token(pipe: Pipeline) -> None:
    """A prefill in pieces never cuts an image; two images of one size share no keys but those before the image."""
    requests = [
        request_of(pipe, asked(picture(0), picture(1))), request_of(pipe, asked(picture(0), picture(2))),
        request_of(pipe, asked(picture(0), picture(1), text="w9 w8 w7")), request_of(pipe, "w1 w2 w3"),
    ]  # fmt: skip
    alone = [answers(pipe, [request])[0] for request in requests]
    assert alone[0][requests[0].start :] != alone[1][requests[1].start :]
    assert answers(pipe, requests, share=True, page=4) == alone
    for positions in (72, 101):
        assert answers(pipe, requests, positions=positions, page=4, share=positions == 101) == alone
    parts = {"iteration": {"name": "self_conditioned", "block": 6}, "decoder": {"name": "renoise", "steps": 4}}
    assert (
        answers(dinfer.Pipeline(dinfer.compose(pipe.model, cache="none", **parts), None, Runtime()), requests) == alone
    )
    first, second = (one.first for one in requests[0].asks[0].stretches)
    for request, shared in ((requests[1], second), (requests[2], second + 64)):  # all before the other image or text
        engine = Engine(pipe.recipe, Runtime(share=True, page=4))
        cached = [[*engine.run([one])][-1].cached for one in (requests[0], request)]
        assert cached[0] == 0 and first < shared - 4 < cached[1] <= shared + 12


def test_an_image_longer_than_a_step_is_refused(pipe: Pipeline) -> None:
    request = request_of(pipe, asked(picture(0)))
    with pytest.raises(ValueError, match=r"computed in one piece.*raise runtime\.positions"):
        Engine(pipe.recipe, Runtime(positions=40)).check(replace(request))


def test_what_a_request_brings_goes_to_other_processes() -> None:
    rows_XD = torch.randn(3, 4).bfloat16()
    ask = Embedded((Stretch(2, Embeddings(rows_XD, b"\x01" * 32), "local"),))
    again = read(json.loads(json.dumps(spelled(ask))))
    assert again == ask and torch.equal(again.stretches[0].embeddings.rows_XD, rows_XD)
    assert hash(ask) == hash(again) and ask.keyed == again.keyed != replace(ask.stretches[0], mutual="all")


def changed(folder: Path, to: Path, change: Any) -> str:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return str(to)


def test_a_tower_of_another_size_is_refused_and_one_that_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    name = "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight"
    wrong = changed(folder, tmp_path / "wrong", lambda tensors: tensors.update({name: torch.zeros(9, 8)}))
    with pytest.raises(
        CheckpointError, match=r"vision tower in .* does not fit.*\n  shape of .*up_proj.*must be \(8, 8\)"
    ):
        dinfer.load(wrong, device="cpu")
    lacks = changed(folder, tmp_path / "lacks", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=r"missing: .*up_proj"):
        dinfer.load(lacks, device="cpu")
    blind = changed(
        folder, tmp_path / "blind", lambda tensors: [tensors.pop(one) for one in [*tensors] if "vision" in one]
    )
    pipe = dinfer.load(blind, device="cpu", iteration={"block": 6})
    with pytest.raises(ValueError, match=r"messages\.0\.content\.1: the checkpoint blind holds no vision tower"):
        pipe.encode(asked(picture(0)))
    assert "m.gguf, a GGUF file, holds no vision tower" in str(eyes_of(GemmaEyes, Path("m.gguf"), pipe.model, 1, WHOLE))
    with pytest.raises(ValueError, match=r"models of the family llada take no images: send text alone"):
        dinfer.load("tiny", device="cpu").encode(asked(picture(0)))


GRAY16 = Image.new("I;16", (4, 4), 55800)
TURNED = Image.Exif()
TURNED[0x0112] = 6
BOMB = png(Image.new("1", (5000, 5000)))
FILES = {
    "empty": (b"", "the file is empty"),
    "text": (b"no picture at all", "no image that is read here: send PNG, JPEG, WEBP or GIF"),
    "tiff": (png(picture(0), "TIFF"), "no image that is read here"),
    "cut": (png(picture(0))[:-300], "damaged or cut off"),
    "deep": (png(GRAY16), r"more than 8 bits a channel \(mode I;16\)"),
    "animated": (png(picture(0), "GIF", save_all=True, append_images=[picture(1)]), "animated, with 2 frames"),
    "bomb": (BOMB, "5000 x 5000 pixels, more than 16,777,216"),
    "address": ("https://example.org/a.png", "is an address, and nothing is fetched"),
    "other data": ("data:text/html;base64,AAAA", "is no image in a data: URL"),
    "base64": ("data:image/png;base64,AA A", "is not base64"),
    "declared": (f"data:image/jpeg;base64,{base64.b64encode(png(picture(0))).decode()}", "declared as image/jpeg"),
    "nowhere": ("/nowhere/a.png", "cannot be read: No such file"),
    "number": (3, "is a path, bytes, a data: URL or an image of Pillow's, not 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_picture_is_refused_with_its_place_and_remedy(name: str) -> None:
    given, message = FILES[name]
    with pytest.raises(ValueError, match=rf"^messages\.0\.content\.1: .*{message}"):
        opened(given, "messages.0.content.1").decoded()


def test_files_are_turned_and_become_rgb(pipe: Pipeline) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png(picture(0), exif=TURNED)).decode()}"
    assert opened(url, "it").decoded().size == (14, 20)
    assert pipe.model.eyes.soft_tokens(opened(url, "it")) == len(pipe.model.eyes.see(opened(url, "it")))
    cmyk = opened(png(picture(0).convert("CMYK"), "JPEG"), "it")
    assert len(pipe.model.eyes.see(cmyk)) == pipe.model.eyes.soft_tokens(cmyk)
    clear = Image.new("RGBA", (20, 14), (0, 0, 0, 0))
    assert opened(clear, "it").decoded().getpixel((0, 0)) == (255, 255, 255)  # whatever transformers would do
    assert pipe.model.eyes.prepared(opened(clear, "it"))[0].max() == 1.0  # white is behind what is clear


GOLDENS = Path(__file__).parents[4] / "shared" / "goldens-images"


@pytest.mark.skipif(not GOLDENS.is_dir(), reason=f"{GOLDENS} is not here")
def test_each_recorded_file_gives_what_it_must() -> None:
    for name, wanted in json.loads((GOLDENS / "files.json").read_text()).items():
        data, declared = (GOLDENS / "files" / name).read_bytes(), wanted.get("declared")
        given = f"data:{declared};base64,{base64.b64encode(data).decode()}" if declared else data
        if wanted["outcome"] == "refused":
            with pytest.raises(ValueError, match=r"^it: "):
                opened(given, "it").decoded()
            continue
        rgb = convert_to_rgb(opened(given, "it").decoded())
        assert rgb.mode == "RGB"
        if wanted["outcome"] == "taken":
            assert (*rgb.size,) == (wanted["width"], wanted["height"])
            assert hashlib.sha256(rgb.tobytes()).hexdigest() == wanted["rgb_sha256"], name


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [{"role": "assistant", "content": [{"type": "image", "image": b"x"}]}],
            r"messages\.0\.content\.0: an image in a",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"messages\.0\.content\.0: .* must be a part of type"),
        ([{"role": "user", "content": [{"type": "image"}]}], "the part has no image"),
        (
            [{"role": "user", "content": [{"type": "image", "image": picture(0)}] * 9}],
            "has 9 images, and 8 is the most",
        ),
        ([{"role": "user", "content": [{"type": "image", "image": picture(0)}] * 4}], "room for 256 positions"),
    ],
)
def test_bad_parts_are_refused(pipe: Pipeline, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe.encode(prompt)


def test_placeholders_need_images(pipe: Pipeline) -> None:
    assert pipe.encode([{"role": "user", "content": "w1 <|image|> w2"}]).count(4) == 0  # what is spelled stays text
    assert pipe.encode([{"role": "user", "content": [{"type": "text", "text": "w1"}]}]) == pipe.encode("w1")
    with pytest.raises(ValueError, match="prompt 0: the image token 4 stands at position 2 without an image"):
        pipe.generate_ids([[2, 9, 4]], max_new_tokens=6)
    tokenizer = copy.deepcopy(pipe.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template writes 0 images of 1"):
        Pipeline(pipe.recipe, tokenizer, Runtime()).encode(asked(picture(0)))


def test_tower_and_soft_tokens_are_counted(pipe: Pipeline, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_and_total", lambda device: (1 << 33, 1 << 33))
    found = dinfer.load(str(folder), device="cpu", runtime=Runtime(memory="9MB", max_length=250, rows=4))
    worker, eyes = found.engine.loop.worker, found.model.eyes
    tower = sum(one.nbytes for part in eyes.parts.values() for one in part.state_dict().values())
    table = 4 * 250 * found.model.spec.hidden * 4  # rows, positions, float32
    assert found.engine.runtime.pages == (9_000_000 - memory.held(found.model) - tower - table) // memory.page_bytes(
        worker
    )
    found.generate("w1", images=picture(0), max_new_tokens=6)
    assert f"vision tower {tower / 1e6:.1f} MB, images of all requests {table / 1e6:.1f} MB" in memory.told(worker)
    with pytest.raises(
        ValueError, match=r"images of all requests 24\.0 MB, .*: use at least 0\.01, which is 24\.\d MB"
    ):
        Pipeline(pipe.recipe, None, Runtime(memory="9MB", max_length=250, rows=1000))
    assert inspect(folder, {}).memory["none"] == memory.held(found.model) + tower


def test_images_take_the_positions_that_the_model_keeps_for_them(folder: Path) -> None:
    few = dinfer.load({"name": "diffusion_gemma", "checkpoint": str(folder), "image_tokens": 70}, device="cpu")
    assert 0 < few.generate("w1", images=picture(0), max_new_tokens=6).prompt_ids.count(4) <= 70
    with pytest.raises(ValueError, match=r"2 images take 1\d\d positions .* room for model\.image_tokens=70 of images"):
        few.encode("w1", images=[picture(0), picture(1)])
    blind = dinfer.load({"name": "diffusion_gemma", "checkpoint": str(folder), "image_tokens": 0}, device="cpu")
    with pytest.raises(ValueError, match=r"model\.image_tokens=0 loads no vision tower: raise it"):
        blind.encode("w1", images=picture(0))


def test_a_saved_model_sees(pipe: Pipeline, tmp_path: Path) -> None:
    pipe.save(tmp_path / "saved")
    again = dinfer.load(str(tmp_path / "saved"), device="cpu", iteration={"block": 6})
    given = opened(picture(0), "it")
    assert torch.equal(again.model.eyes.see(given).rows_XD, pipe.model.eyes.see(given).rows_XD)


def test_a_picture_changes_the_answer_and_its_tokens_are_counted(pipe: Pipeline) -> None:
    some, same, other = pipe.generate([asked(picture(i)) for i in (0, 0, 9)], max_new_tokens=12, seed=3, temperature=0)
    assert some.ids == same.ids and some.canvas != other.canvas
    assert some.prompt_ids.count(4) == len(pipe.model.eyes.see(opened(picture(0), "it")))
    assert "".join(pipe.stream(asked(picture(0)), max_new_tokens=12, seed=3, temperature=0)) == some.text


def test_images_beside_texts_are_messages_with_pictures(pipe: Pipeline) -> None:
    parts = [{"type": "image", "image": picture(0)}, {"type": "text", "text": "w1"}]
    how: dict[str, Any] = {"max_new_tokens": 6, "seed": 3, "temperature": 0}
    wanted, plain = pipe.generate([[{"role": "user", "content": parts}], "w1"], **how)
    assert pipe.generate("w1", images=picture(0), **how).canvas == wanted.canvas
    found = pipe.generate(["w1", "w1"], images=[png(picture(0)), None], **how)
    assert [one.canvas for one in found] == [wanted.canvas, plain.canvas]
    for prompts, images, said in (
        (["w1", "w1"], [picture(0)], "images has 1 entries for 2 prompts"),
        ([{"role": "user", "content": "w1"}], picture(0), "put images into the messages"),
        ("w1", ["nothing.png"], "images: .*nothing.png"),
        (["w1"], [[picture(0), 7]], "images.0.1: an image is a path"),
    ):
        with pytest.raises(ValueError, match=said):
            pipe.generate(prompts, images=images, **how)
    with pytest.raises(ValueError, match="take no images"):
        dinfer.load("tiny", device="cpu").generate("w1", images=picture(0))


def test_every_entry_takes_images_or_says_which_does(pipe: Pipeline) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "seed": 3, "temperature": 0}
    for images in (picture(0), picture(9)):
        wanted = pipe.generate("w1", images=images, **how)
        assert "".join(pipe.stream("w1", images=images, **how)) == wanted.text
        assert [*pipe.updates("w1", images=images, **how)][-1].completion.canvas == wanted.canvas  # type: ignore[union-attr]
        assert pipe.encode("w1", images=images) == wanted.prompt_ids
    one, same, other, bare = (
        pipe.read(["w1"], choice=["w2", "w3"], images=images)[0].slots["choice"].probabilities["w2"]
        for images in ([picture(0)], [[picture(0)]], [picture(9)], None)
    )
    assert one == same and len({one, other, bare}) == 3
    seen, plain = (
        pipe.rollout(["w1"], n=1, max_new_tokens=6, seed=3, images=images, temperature=0).prompt_lengths.item()
        for images in ([picture(0)], None)
    )
    assert seen - plain == len(wanted.prompt_ids) - len(pipe.encode("w1"))
    for entry in (pipe.generate_ids, pipe.infill_ids):
        with pytest.raises(TypeError, match=r"takes no images: give them to generate, stream, updates, read or"):
            entry([[3]], images=picture(0))
