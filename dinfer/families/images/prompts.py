"""Conversations whose messages have parts: texts and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, cast

from dinfer.families.abilities.embedded import Embedded, Stretch
from dinfer.families.images import Seeing
from dinfer.families.images.eyes import Eyes
from dinfer.families.images.pictures import MOST_IMAGES, Picture, opened, sent

__all__ = ["MOST_IMAGES", "PromptIds", "encode_parts", "eyes_of", "opened", "sent"]


class PromptIds(list[int]):
    """Token ids of a prompt with images."""

    embedded: Embedded | None = None

    def __getitem__(self, place: Any) -> Any:
        """A slice of all is the prompt; any other has no images."""
        found = super().__getitem__(place)
        return self if isinstance(place, slice) and len(found) == len(self) else found


def eyes_of(network: Any) -> Eyes | str:
    """What sees for a network; why nothing does."""
    if isinstance(network, Seeing) and network.eyes:
        return cast(Eyes | str, network.eyes)
    return f"models of the family {network.spec.family} take no images: send text alone"


def encode_parts(pipe: Any, chat: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> PromptIds | list[int]:
    """Token ids of a conversation some of whose contents are lists of parts. Raises ValueError.

    A part is {"type": "text", "text": ...} or {"type": "image", "image": a path, bytes, a data: URL or an image of
    Pillow's}; `path` and `url` may stand for `image`, and parts of type "image_url" are OpenAI's. `chat`: the
    pipeline's `ChatTemplate`; `how`: what its `encode` takes.
    """
    plain, given = [], list[tuple[str, Any]]()
    for i, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            parts = [_part(part, f"messages.{i}.content.{j}", given, message["role"]) for j, part in enumerate(content)]
            images = any(part["type"] == "image" for part in parts)
            content = parts if images else "\n".join(part["text"] for part in parts)
        plain.append({**message, "content": content})
    if not given:
        return list(chat.encode(plain, **how))
    if isinstance(own := eyes_of(pipe.model), str):
        raise ValueError(f"{given[0][0]}: {own}")
    if len(given) > MOST_IMAGES:
        raise ValueError(f"{given[MOST_IMAGES][0]}: a request has {len(given)} images, and {MOST_IMAGES} is the most")
    pictures = [opened(one, where) for where, one in given]
    alone = len(pictures) == 1
    counts = [own.soft_tokens(picture, alone=alone) for picture in pictures]
    ids, firsts = _expanded(chat.encode(plain, **how, **own.chat(chat.tokenizer)), own, counts)
    room, many = pipe.engine.max_length, sum(counts) > own.most
    if many or len(ids) >= room:
        most = f"for model.image_tokens={own.most} of images" if many else f"for {room} positions"
        raise ValueError(
            f"{given[-1][0]}: {len(given)} images take {sum(counts)} positions of a prompt of {len(ids)}, and there is "
            f"room {most}: send fewer or less text"
        )
    between = pipe.engine.between_rounds if pipe.model.device.type == "cuda" else nullcontext
    pairs = zip(firsts, pictures, strict=True)
    ids.embedded = Embedded(
        tuple(Stretch(first, own.see(one, between, alone=alone), own.mutual) for first, one in pairs)
    )
    return ids


def beside(prompts: Any, images: Any, *, single: bool, chat: bool | None = None, name: str = "images") -> Any:
    """Text prompts as messages of a user with pictures before the text: one or several, of one prompt or of each.

    Raises ValueError for a prompt that is a conversation, for a file that is no image, and for another number of
    entries than prompts. Errors begin with `name`.
    """
    if chat is False:
        raise ValueError(f"{name} goes into a message, and chat=false asks for plain text: leave one out")
    if not single:
        prompts, each = [*prompts], [*images] if isinstance(images, list | tuple) else [images]
        if len(each) != len(prompts):
            raise ValueError(f"{name} has {len(each)} entries for {len(prompts)} prompts: give each its own, or null")
        return [
            one if own is None else beside(one, own, single=True, name=f"{name}.{i}")
            for i, (one, own) in enumerate(zip(prompts, each, strict=True))
        ]
    if not isinstance(prompts, str):
        raise ValueError(f"{name} goes with a text: put images into the messages, as parts")
    several = images if isinstance(images, list | tuple) else [images]
    where = [f"{name}.{i}" if len(several) > 1 else name for i in range(len(several))]
    parts = [{"type": "image", "image": opened(one, at)} for one, at in zip(several, where, strict=True)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompts}]}]


def _part(part: Any, where: str, given: list[tuple[str, Any]], role: str) -> dict[str, str]:
    """A part as the template takes it. What an image is of is added to `given`."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url"):
        raise ValueError(f"{where}: {part!r:.80} must be a part of type 'text' with a text, or of type 'image'")
    if role != "user":
        raise ValueError(f"{where}: an image in a message of role {role!r:.80}: only messages of the user may have one")
    image = part.get("image_url")
    image = image.get("url") if isinstance(image, Mapping) else image
    image = next(
        (one for one in (image, *(part.get(name) for name in ("image", "path", "url"))) if one is not None), None
    )
    if image is None:
        raise ValueError(f"{where}: the part has no image: give it as 'image'")
    given.append((image.where if isinstance(image, Picture) else where, image))
    return {"type": "image"}


def _expanded(ids: Sequence[int], own: Eyes, counts: Sequence[int]) -> tuple[PromptIds, list[int]]:
    """The ids with as many placeholders as each image has soft tokens, and where the first of each stands."""
    token, (before, after) = own.token, own.around
    marks = [at for at, one in enumerate(ids) if one == token]
    if len(marks) != len(counts):
        raise ValueError(
            f"the checkpoint's chat template writes {len(marks)} images of {len(counts)}: put one that writes each "
            "image part beside the weights, as chat_template.jinja"
        )
    found, firsts = PromptIds(ids[: marks[0]]), []
    for (mark, behind), count in zip(pairwise([*marks, len(ids)]), counts, strict=True):
        found.extend(before)
        firsts.append(len(found))
        found.extend([token] * count + [*after])
        found.extend(ids[mark + 1 : behind])
    return found, firsts
