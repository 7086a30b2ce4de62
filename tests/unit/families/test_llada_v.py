"""LLaDA-V: tiles, soft tokens and the network against transformers' own, decoding against its published rule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.images import GRIDS, LLADA_V_CONFIG, llada_v, picture, png, save_llada_v
from transformers import LlavaOnevisionModel

import dinfer
from dinfer.core.engine.engine import Engine
from dinfer.core.engine.runtime import Runtime
from dinfer.core.loading.checkpoint import family_of
from dinfer.core.loading.files import CheckpointError
from dinfer.core.pipeline import Pipeline
from dinfer.core.ranks.split import WHOLE, Rank
from dinfer.core.registry import MODELS
from dinfer.families.images.eyes import eyes_of
from dinfer.families.images.llava import SYSTEM, LlavaEyes
from dinfer.families.images.pictures import opened
from dinfer.lab.inspect import inspect

PUBLISHED: dict[str, Any] = {
    "iteration": "blockwise_128", "decoder": {"name": "until_stop", "steps": 4096, "stops": [6]}, "cache": "none",
    "sampling": {"name": "standard", "suppress": [0, 1, 4, 5]},
}  # fmt: skip

STOP = 28  # a token that the random network writes
STOPPED = PUBLISHED | {"decoder": {"name": "until_stop", "steps": 4096, "stops": [STOP]}}


@pytest.fixture(scope="module")
def theirs() -> LlavaOnevisionModel:
    return llada_v()


@pytest.fixture(scope="module")
def folder(theirs: LlavaOnevisionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llada_v(theirs, tmp_path_factory.mktemp("eyes") / "seeing")


@pytest.fixture(scope="module")
def pipe(folder: Path) -> Pipeline:
    return dinfer.load(str(folder), device="cpu", **PUBLISHED)


def soft_tokens(theirs: LlavaOnevisionModel, pixels_TCPP: torch.Tensor, size: tuple[int, int], images: int = 1) -> Any:
    """What transformers makes of the tiles of an image, one of so many of its request."""
    rows = pixels_TCPP[None].repeat(images, 1, 1, 1, 1)
    sizes, counts = torch.tensor([[size[1], size[0]]] * images), torch.tensor([images])
    how = {"vision_aspect_ratio": "anyres_max_2", "batch_num_images": counts, "vision_feature_layer": -2}
    return theirs.get_image_features(rows, sizes, vision_feature_select_strategy="full", **how).pooler_output[0]


@pytest.mark.parametrize("size", [(20, 14), (14, 20), (7, 7), (40, 3), (3, 40), (100, 90), (1, 1), (15, 50), (300, 1)])
def test_soft_tokens_are_those_of_transformers(theirs: Any, pipe: Pipeline, size: tuple[int, int]) -> None:
    eyes, given = pipe.model.eyes, opened(picture(size[0], *size), "it")
    for alone in (True, False):
        pixels, told = eyes.prepared(given, alone=alone)
        want_XD, got = soft_tokens(theirs, pixels, size, 1 if alone else 2), eyes.see(given, alone=alone)
        assert torch.allclose(got.rows_XD, want_XD, atol=2e-5)
        assert len(got) == eyes.soft_tokens(given, alone=alone) and told.tolist() == ([*size] if alone else [0, 0])


@pytest.mark.parametrize("size", [(20, 14), (14, 20), (40, 3), (3, 40), (23, 24), (1, 1)])
def test_tiles_are_those_of_the_published_rule_in_pillow(pipe: Pipeline, size: tuple[int, int]) -> None:
    """The image as a whole, and cut where most of it shows and then least is wasted, with black borders."""
    image, (width, height) = picture(3, *size), size
    worth = {}
    for wide, high in GRIDS:
        scale = min(wide / width, high / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        worth[wide, high] = (shown, shown - wide * high)
    wide, high = max(worth, key=lambda grid: worth[grid])
    scale = min(wide / width, high / height)
    fits = wide if wide / width < high / height else min(math.ceil(width * scale), wide)
    tall = high if wide / width >= high / height else min(math.ceil(height * scale), high)
    black = Image.new("RGB", (wide, high))
    black.paste(image.resize((fits, tall)), ((wide - fits) // 2, (high - tall) // 2))
    places = [(x, y) for y in range(0, high, 7) for x in range(0, wide, 7)]
    tiles = [image.resize((7, 7)), *(black.crop((x, y, x + 7, y + 7)) for x, y in places)]
    bytes_T = [torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).view(7, 7, 3) for one in tiles]
    want_TPPC = torch.stack(bytes_T) / 127.5 - 1
    got_TCPP, _ = pipe.model.eyes.prepared(opened(image, "it"))
    torch.testing.assert_close(got_TCPP, want_TPPC.permute(0, 3, 1, 2), atol=1e-6, rtol=0)


def test_an_image_among_several_gets_a_grey_border_and_is_not_cut(pipe: Pipeline) -> None:
    white = opened(Image.new("L", (14, 7), 255), "it")
    (pixels_1CPP, _) = pipe.model.eyes.prepared(white, alone=False)
    assert pixels_1CPP.shape == (1, 3, 7, 7) and pixels_1CPP[0, :, 3].min() > 0.99
    assert torch.allclose(pixels_1CPP[0, :, 0], torch.tensor(127 / 127.5 - 1), atol=0.1)


def asked(*images: Any, text: str = "w1 w2") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def logits(theirs: Any, x_TD: torch.Tensor) -> torch.Tensor:
    """Of transformers' Llama whose positions all see each other."""
    mask = torch.zeros(1, 1, len(x_TD), len(x_TD))
    return theirs.head(theirs.language_model(inputs_embeds=x_TD[None], attention_mask=mask).last_hidden_state)[0]


def published(
    theirs: Any, prompt_XD: torch.Tensor, new: int, guidance: float = 0, stop: int = 6
) -> tuple[list[int], int]:
    """`generate_with_embeds` of one block: the tokens before the stop token, and how many forwards they took.

    A step decodes one token: the surest of those before the stop token. Four tokens are forbidden.
    """
    embed, ids, end = theirs.language_model.embed_tokens, torch.full((new,), 2), new
    for step in range(new):
        if not (ids[:end] == 2).any():
            return ids[:end].tolist(), step
        one = logits(theirs, torch.cat((prompt_XD, embed(ids))))[-new:]
        if guidance:
            bare = logits(theirs, torch.cat((embed(torch.full((len(prompt_XD),), 2)), embed(ids))))[-new:]
            one = bare + (guidance + 1) * (one - bare)
        one[:, [0, 1, 4, 5]] = -torch.inf
        sure = one.double().softmax(-1).max(-1)
        at = torch.where(ids == 2, sure.values, -1)[:end].argmax()
        ids[at] = sure.indices[at]
        end = int(at) if ids[at] == stop else end
    return ids[:end].tolist(), new


@torch.no_grad()
def test_an_answer_is_that_of_the_published_rule_over_transformers_network(
    theirs: Any, pipe: Pipeline, folder: Path
) -> None:
    stopping = dinfer.load({"name": "llada_v", "checkpoint": str(folder), "stop_ids": [STOP]}, device="cpu", **STOPPED)
    for images, guidance in (((picture(0),), 0.0), ((picture(0),), 1.5), ((picture(1), picture(2)), 0.0)):
        prompt = pipe.encode(asked(*images))
        x_XD = theirs.language_model.embed_tokens(torch.tensor(prompt))
        seen = [pipe.model.eyes.see(opened(one, "it"), alone=len(images) == 1).rows_XD for one in images]
        x_XD[torch.tensor(prompt) == 3] = torch.cat(seen)
        got = pipe.generate(asked(*images), max_new_tokens=10, options={"guidance": guidance})
        assert (got.ids, got.counts.forwards) == published(theirs, x_XD, 10, guidance)
        early = stopping.generate(asked(*images), max_new_tokens=10, options={"guidance": guidance})
        assert (early.ids, early.counts.forwards) == published(theirs, x_XD, 10, guidance, STOP)


def test_two_pictures_at_once_keep_their_answers_under_every_cache(pipe: Pipeline) -> None:
    alone = [pipe.generate(asked(picture(i)), max_new_tokens=8).canvas for i in range(3)]
    assert [one.canvas for one in pipe.generate([asked(picture(i)) for i in range(3)], max_new_tokens=8)] == alone
    assert len({*map(tuple, alone)}) == 3
    for cache in ("dual", "prefix"):
        recipe = dinfer.compose(
            pipe.model, iteration={"name": "blockwise", "block": 8}, decoder="threshold", cache=cache
        )
        other = Pipeline(recipe, pipe.tokenizer, Runtime(share=True, page=4))
        both = [other.generate([asked(picture(i)) for i in range(3)], max_new_tokens=8) for _ in range(2)]
        canvases = [[one.canvas for one in answers] for answers in both]
        assert canvases[0] == canvases[1] and len({*map(tuple, canvases[0])}) > 1


def test_the_conversation_is_the_published_one(pipe: Pipeline) -> None:
    count, word = pipe.model.eyes.soft_tokens(opened(picture(0), "it")), "<|reserved_token_0|>"
    turn = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>".format
    text = "<|startoftext|>" + turn("system", SYSTEM) + turn("user", f"{word * count}\nw1 w2")
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert pipe.encode(asked(picture(0))) == pipe.need_tokenizer().encode(text + header, add_special_tokens=False)
    base, system = pipe.model.eyes.side**2 + 1, {"role": "system", "content": "w9"}
    text = "<|startoftext|>" + turn("system", "w9") + turn("user", f"{word * base} {word * base}\nw1 <")
    got = pipe.encode([system, *asked(picture(0), picture(1), text="w1 <|reserved_token_0|>")])
    assert got.count(3) == 2 * base  # what a message spells is text
    assert got[: len(got) - 20] == pipe.need_tokenizer().encode(text, add_special_tokens=False)[: len(got) - 20]


def test_a_turned_file_takes_as_many_positions_as_its_picture(pipe: Pipeline) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    eyes = pipe.model.eyes
    for kind in ("PNG", "JPEG"):
        file = opened(png(picture(0, 40, 3), kind, exif=turned), "it")
        assert file.size == (3, 40) and len(eyes.see(file)) == eyes.soft_tokens(file)
    data = png(picture(0, 40, 3), exif=turned)
    at = data.index(b"eXIf") - 4
    length = 12 + int.from_bytes(data[at : at + 4], "big")
    end = data.index(b"IEND") - 4
    late = data[:at] + data[at + length : end] + data[at : at + length] + data[end:]
    with pytest.raises(ValueError, match="it: its EXIF data stand behind its pixels: save it once more"):
        eyes.see(opened(late, "it"))


def changed(folder: Path, to: Path, tensors: Any = None, **fields: Any) -> str:
    """A copy of a checkpoint with other tensors or fields."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "config.json").write_text(json.dumps(LLADA_V_CONFIG | fields))
    if tensors is not None:
        tensors(found := load_file(folder / "model.safetensors"))
        save_file(found, to / "model.safetensors")
    return str(to)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mm_projector_type": "linear"}, "mm_projector_type='linear' is not supported; only 'mlp2x_gelu' is"),
        ({"mm_patch_merge_type": "flat"}, "mm_patch_merge_type='flat' is not supported"),
        ({"mm_vision_tower": "openai/clip"}, "mm_vision_tower='openai/clip' must be a SigLIP tower"),
        ({"mm_use_im_start_end": True}, "mm_use_im_start_end=True is not supported"),
        ({"vision_config": None}, r"vision tower in .* does not fit its config.json"),
        ({"d_model": 32}, "d_model is a field of LaViDa, which is not supported"),
        ({"add_faster_video": True}, "add_faster_video=True is not supported"),
        ({"mm_perceiver_depth": 3}, "mm_perceiver_depth=3: the family 'llada_v' does not know this"),
    ],
)
def test_other_networks_are_refused_by_the_name_of_their_field(
    folder: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = changed(folder, tmp_path / "other", **fields)
    with pytest.raises(CheckpointError, match=message):
        dinfer.load(path, device="cpu")
    if fields.keys() & {"mm_vision_tower", "mm_patch_merge_type"}:
        blind = dinfer.load({"name": "llada_v", "checkpoint": path, "image_tokens": 0}, device="cpu")
        assert blind.generate("w1", max_new_tokens=4).ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_aspect_ratio": "pad"}, "image_aspect_ratio='pad' must be anyres_max_ and a number"),
        ({"image_grid_pinpoints": [[7, 8]]}, "must be pairs of multiples of 7"),
        ({"image_token_index": 99}, "image_token_index=99 must be an id of the vocabulary"),
        ({"image_token_index": 20}, "the tokenizer has no such special token"),
    ],
)
def test_settings_of_pictures_alone_refuse_pictures(
    folder: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    pipe = dinfer.load(changed(folder, tmp_path / "other", **fields), device="cpu")
    assert pipe.generate("w1", max_new_tokens=4).ids
    with pytest.raises(ValueError, match=message):
        pipe.generate("w1", images=picture(0), max_new_tokens=4)


def test_a_checkpoint_loads_whole_or_says_what_lacks(pipe: Pipeline, folder: Path, tmp_path: Path) -> None:
    begin = "model.vision_tower.vision_tower.vision_model."
    layer = f"{begin}encoder.layers.1.mlp.fc1.weight"
    lacks = changed(folder, tmp_path / "lacks", lambda tensors: tensors.pop(layer))
    with pytest.raises(CheckpointError, match=r"missing: .*layers\.1\.mlp\.fc1\.weight"):
        dinfer.load(lacks, device="cpu")
    assert "layers.1.mlp.fc1.weight" in inspect(Path(lacks), {}).problems[0] and not inspect(folder, {}).problems
    more = changed(folder, tmp_path / "more", lambda tensors: tensors.update({f"{begin}head.probe": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"head\.probe"):
        dinfer.load(more, device="cpu")
    drop = ("model.vision", "model.mm", "model.image")
    text = changed(
        folder, tmp_path / "text", lambda tensors: [tensors.pop(one) for one in [*tensors] if one.startswith(drop)],
        model_type="llada",
    )  # fmt: skip
    blind = dinfer.load(text, device="cpu", **PUBLISHED)
    assert blind.generate("w1", max_new_tokens=6).ids == pipe.generate("w1", max_new_tokens=6).ids
    with pytest.raises(ValueError, match="the checkpoint text holds no vision tower: get one that does, or send text"):
        blind.generate("w1", images=picture(0))
    assert "m.gguf, a GGUF file, holds no vision tower" in str(eyes_of(LlavaEyes, Path("m.gguf"), pipe.model, 1, WHOLE))


def test_a_rank_that_sees_nothing_holds_no_tower_and_knows_the_positions(pipe: Pipeline, folder: Path) -> None:
    first, second = (eyes_of(LlavaEyes, folder, pipe.model, 99, Rank(rank, 2)) for rank in (0, 1))
    assert isinstance(first, LlavaEyes) and isinstance(second, LlavaEyes)
    assert first.nbytes > 0 == second.nbytes and (first.most, first.token) == (second.most, second.token)


def test_the_published_sizes(pipe: Pipeline) -> None:
    """Of an image of 4,000 x 3,000 and of a small one, worked out by hand."""
    eyes: LlavaEyes = object.__new__(LlavaEyes)
    eyes.side, eyes.tile, eyes.tiles = 27, 384, 4
    eyes.grids = [[384 * j, 384 * i] for i in range(1, 7) for j in range(1, 7)]
    # 6 x 5 tiles, 162 x 135 of which 121 rows show it; shrunk by 2.592 to 46 rows of 62, each with a newline.
    assert eyes.cut(4000, 3000) == (5, 6) and eyes.kept(5, 6, 4000, 3000)[1] == (46, 62)
    assert eyes.soft_tokens(opened(Image.new("RGB", (4000, 3000)), "it")) == 729 + 46 * 63
    assert eyes.soft_tokens(opened(Image.new("RGB", (100, 100)), "it")) == 729 + 27 * 28
    assert eyes.soft_tokens(opened(Image.new("RGB", (100, 100)), "it"), alone=False) == 730


def test_families_of_one_model_type_are_told_apart() -> None:
    llada = {"model_type": "llada"}
    assert family_of(llada | {"d_model": 8}) == "llada" and family_of(llada | {"hidden_size": 8}) == "llada_v"
    assert family_of(llada | {"hidden_size": 8, "num_experts": 2}) == "llada_moe"
    assert [name for name in MODELS.names() if MODELS.get(name).matches(LLADA_V_CONFIG)] == ["llada_v"]


def test_images_that_take_too_much_are_refused(folder: Path, pipe: Pipeline) -> None:
    few = dinfer.load({"name": "llada_v", "checkpoint": str(folder), "image_tokens": 25}, device="cpu")
    with pytest.raises(ValueError, match=r"1 images take 27 positions .* room for model\.image_tokens=25 of images"):
        few.encode("w1", images=picture(0))
    with pytest.raises(ValueError, match="the image token 3 stands at position 1 without an image"):
        Engine(pipe.recipe, Runtime()).check(pipe.requests([[6, 3]], 4, None)[0])
