"""Images in bodies of requests: data: URLs become opened pictures before anything else reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from dinfer.core.provided import needed
from dinfer.serving.errors import ApiError, at_field, invalid, refused
from dinfer.serving.forms import Strict

KINDS = ("image_url", "input_image", "image")


def _is_open(value: Any) -> bool:
    """Whether it is a picture, which no value of JSON is."""
    return not isinstance(value, str | int | float | list | dict | None)


def _opened(value: Any) -> Any:
    if not _is_open(value):
        raise ValueError("must be sent as a data: URL")
    return value


def objects_in(value: Any) -> list[tuple[int, dict[str, Any]]]:
    """The objects in a list of a body that is not validated yet, with their places; none if it is no list."""
    return [(i, one) for i, one in enumerate(value) if isinstance(one, dict)] if isinstance(value, list) else []


class ImagePart(Strict):
    """An image of a message, opened by `opened_in`."""

    type: Literal["image"]
    image: Annotated[Any, AfterValidator(_opened)]


def opened_in(messages: Any, field: str = "messages") -> Any:
    """Messages of a body that is not validated yet, their images opened. Raises ApiError."""
    places = [
        (n, m, f"{field}.{n}.content.{m}", message.get("role"))
        for n, message in objects_in(messages)
        for m, part in objects_in(message.get("content"))
        if part.get("type") in KINDS and not _is_open(part.get("image"))
    ]
    if not places:
        return messages
    with at_field(places[0][2]):
        images = needed("images", "an image", "families")
    if len(places) > (most := images.MOST_IMAGES):
        raise invalid(places[most][2], f": a request has {len(places)} images, and {most} is the most")
    found = {n: {**messages[n], "content": [*messages[n]["content"]]} for n, *_ in places}
    for n, m, where, role in places:
        if role not in (None, "user"):
            raise invalid(where, f": an image in a message of role {role!r:.80}: only the user's may have one")
        found[n]["content"][m] = {"type": "image", "image": _read(messages[n]["content"][m], where, images)}
    return [found.get(n, message) for n, message in enumerate(messages)]


def _read(part: Mapping[str, Any], where: str, images: Any) -> Any:
    """The picture of a part of OpenAI's two APIs or of Anthropic's."""
    given, name = part.get("image_url"), "image_url"
    more = given if isinstance(given, Mapping) else part
    if (detail := more.get("detail")) not in (None, "auto"):
        raise refused(f"{where}.detail", detail, "is not supported: leave it out, or send 'auto'")
    if part["type"] == "image" and isinstance(source := part.get("source"), Mapping):
        name = "source"
        if source.get("type") != "base64":
            raise refused(
                f"{where}.source.type", source.get("type"), "is not supported: nothing is fetched; send base64"
            )
        given = {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"}
    if part.get("file_id") is not None:
        raise refused(
            f"{where}.file_id", part["file_id"], "is not supported: this server keeps no files; send a data: URL"
        )
    url = given.get("url") if isinstance(given, Mapping) else given
    where = f"{where}.{name}"
    if not isinstance(url, str):
        raise invalid(where, " must be a data: URL")
    try:
        return images.sent(url, where)
    except ValueError as error:
        raise ApiError(400, str(error), where, "invalid_value") from error


def pictures_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """All pictures of a conversation."""
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] == "image":
                yield part["image"]


def content_of(parts: Sequence[Any], text: str) -> str | list[dict[str, Any]]:
    """The content of a message with these parts: its text, if there is no image among them."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return text
    read = (
        {"type": "image", "image": part.image} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in parts
    )
    return [*read]


def joined(one: Any, other: Any) -> Any:
    """Two contents as one."""
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    return [
        part
        for content in (one, other)
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
