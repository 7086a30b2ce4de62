"""Image files, which may come from anybody: what is opened, within which limits, and how it becomes RGB of 8 bits."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dinfer.core.pipeline.inputs import named

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # others are not even probed
MOST_BYTES, MOST_PIXELS, MOST_IMAGES = 1 << 25, 1 << 24, 8
DATA = re.compile(r"data:(image/(?:png|jpeg|webp|gif));base64,")
ORIENTATION = 0x0112  # of EXIF
INSTALL = "images need Pillow: pip install 'dinfer[images]'"


@dataclass(frozen=True, slots=True)
class Picture:
    """A file whose header was read, or an image of Pillow's, within the limits. Its pixels are not decoded yet."""

    image: Image
    where: str  # errors begin with it

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, turned as EXIF says, from the header alone: a PNG that has EXIF data behind its pixels is
        taken as it is. Raises ValueError."""
        late = self.image.format == "PNG" and not {"exif", "Raw profile type exif"} & self.image.info.keys()
        with named(self.where), _told():
            turned = not late and self.image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        width, height = self.image.size
        return (height, width) if turned else (width, height)

    def decoded(self) -> Image:
        """The pixels, turned as EXIF says, with white behind what is clear. Raises ValueError for a damaged file."""
        from PIL import Image, ImageOps

        with named(self.where), _told():
            self.image.load()
            turned = ImageOps.exif_transpose(self.image)
            if not turned.has_transparency_data:
                return turned
            clear = turned.convert("RGBA")  # transformers 5.16 keeps the hidden colour, often black
            return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")


def opened(given: Any, where: str) -> Picture:
    """An image of a file's path, its bytes, a data: URL or an image of Pillow's. Errors begin with `where`."""
    if isinstance(given, Picture):
        return given
    with named(where):
        check_installed()
        from PIL import Image

        if isinstance(given, Image.Image):
            return Picture(_within(given), where)
        declared = None
        if isinstance(given, str) and given.startswith("data:"):
            declared, given = of_data_url(given)
        elif isinstance(given, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", given):
            raise ValueError(
                f"{given!r:.80} is an address, and nothing is fetched: give a file, its bytes or a data: URL"
            )
        if isinstance(given, str | os.PathLike):
            given = _read(given)
        if not isinstance(given, bytes | bytearray | memoryview):
            said = " ".join(repr(given).split())  # arrays have several lines
            raise ValueError(f"an image is a path, bytes, a data: URL or an image of Pillow's, not {said:.80}")
        return Picture(_of_bytes(bytes(given), declared), where)


def sent(url: str, where: str) -> Picture:
    """An image in a data: URL, as clients of a server send it. Errors begin with `where`."""
    with named(where):
        check_installed()
        declared, data = of_data_url(url)
        return Picture(_of_bytes(data, declared), where)


def check_installed() -> None:
    """Raises ValueError without Pillow."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ValueError(INSTALL) from error


def of_data_url(url: str) -> tuple[str, bytes]:
    """The declared type, and the bytes, of a data: URL. Raises ValueError for any other address."""
    if (found := DATA.match(url)) is None:
        raise ValueError(
            f"{url!r:.60} is no image in a data: URL, and nothing is fetched: send "
            "data:image/png;base64,... (png, jpeg, webp or gif)"
        )
    try:
        return found[1], base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"what follows {found[0]!r} is not base64 ({error}): encode the file's bytes") from error


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{os.fspath(path)!r:.200} cannot be read: {error.strerror}") from error


def _of_bytes(data: bytes, declared: str | None) -> Image:
    from PIL import Image as module

    if not data:
        raise ValueError("the file is empty: it has 0 bytes")
    if len(data) > MOST_BYTES:
        raise ValueError(f"the file has more than {MOST_BYTES:,} bytes: save it smaller")
    with _told():
        image = module.open(io.BytesIO(data), formats=FORMATS)
    found = module.MIME[image.format or ""]
    if declared is not None and declared != found:
        raise ValueError(f"it is declared as {declared} and is {found}: declare what it is")
    return _within(image)


def _within(image: Image) -> Image:
    width, height = image.size
    if not width * height:
        raise ValueError(f"it has {width} x {height} pixels, and needs at least one")
    if width * height > MOST_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels, more than {MOST_PIXELS:,}: make it smaller")
    with _told():
        frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise ValueError(f"it is animated, with {frames} frames: send one frame as an image")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 8 bits a channel (mode {image.mode}): save it with 8")
    return image


@contextmanager
def _told() -> Iterator[None]:
    """Pillow's errors as one sentence."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError as error:
        raise ValueError(
            f"it is no image that is read here: send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        ) from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels: make it smaller") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"it is damaged or cut off ({error}): save it once more") from error
