"""Errors in the form of OpenAI's API."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from dinfer.structure import ConstraintError

PROMPTS = {"prompt", "messages", "content", "text", "suffix", "prediction", "input", "body", "arguments"}
SHOWN = 80  # characters of a client's names and values in an answer
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(slots=True)
class ApiError(Exception):
    """An error for the client: HTTP status, a sentence, the field at fault, and a code for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

    def __post_init__(self) -> None:
        self.param = self.param and self.param[:SHOWN]

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # A client's words may hold half of a surrogate pair.
        message, param = (
            None if t is None else t.encode(errors="backslashreplace").decode() for t in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """The whole answer."""
        own = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        own |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse(self.body(), self.status, {**own, **(headers or {})})


def refused(field: str, value: Any, reason: str) -> ApiError:
    """The error for a value that this server, model or recipe cannot honour."""
    return ApiError(400, f"{named(field, value)} {reason}", field, "unsupported_value")


def named(field: str, value: Any) -> str:
    """A field and its value, as messages show them. What may hold a prompt is left out, since proxies log messages."""
    plain = isinstance(value, str | int | float | None) and field.rpartition(".")[2] not in PROMPTS
    return f"{field:.{SHOWN}}={value!r:.{SHOWN}}" if plain else f"{field:.{SHOWN}}"


def invalid(field: str, reason: str, code: str = "invalid_value") -> ApiError:
    """The error for a field that contradicts others, or that is wrong for a reason that names its value."""
    return ApiError(400, f"{field:.{SHOWN}}{reason}", field, code)


@contextmanager
def at_field(field: str) -> Iterator[None]:
    """Within, a ValueError becomes the error for this field; that of a form names the keyword at fault as well."""
    try:
        yield
    except ValueError as error:
        path, what = field, str(error)
        if isinstance(error, ConstraintError) and error.path:
            path, what = f"{field}.{error.path}", error.message
        raise ApiError(400, f"{path:.{3 * SHOWN}}: {what}", path, "invalid_value") from error
