"""Errors, in the form of the API that a client speaks."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

from dinfer.structure import ConstraintError

T = TypeVar("T", bound=BaseModel)
PROMPTS = {
    "prompt", "messages", "content", "text", "suffix", "prediction", "input", "body", "arguments", "instructions",
    "state", "system", "description", "thinking", "reasoning", "reasoning_content", "cache_salt",
}  # fmt: skip
IN_TEXT = re.compile(r"(line|position) \d+")  # where a text is wrong, which is no field of it
SHOWN = 80  # characters of a client's names and values in an answer
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = TYPES | {
    403: "permission_error", 413: "request_too_large", 500: "api_error", 408: "timeout_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


@dataclass(slots=True)
class ApiError(Exception):
    """An error for the client: HTTP status, a sentence, the field at fault, and a code for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] | None = None  # for clients of Anthropic's
    malformed: bool = False  # the body is not of the request's shape

    def __post_init__(self) -> None:
        self.param = self.param and self.param[:SHOWN]

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # A client's words may hold half of a surrogate pair.
        message, param = (
            None if t is None else t.encode(errors="backslashreplace").decode() for t in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self, path: str, request_id: str | None) -> JSONResponse:
        """The whole answer to a request for a path, as its API gives errors."""
        own = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        own |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        body, status = self.body(), self.status
        if path == "/v1/messages" or path.startswith("/v1/messages/"):
            body = anthropic(self, request_id)
        if path == "/v1/systemone":  # its clients read one or the other
            error = body["error"]
            where = ["body", *(error["param"] or "").split(".")]
            body |= {"detail": [{"loc": where, "msg": error["message"], "type": error["code"] or error["type"]}]}
            status = 422 if self.malformed else status
        return JSONResponse(body, status, {**own, **self.headers})


def anthropic(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """An error as Anthropic's API gives it: its message begins with the field."""
    told = error.body()["error"]
    message, where = told["message"], told["param"]
    if where and not message.startswith(where):
        message = f"{where}: {message}"
    if error.code == "context_length_exceeded":  # words that agents look for
        message += " The prompt is too long."
    kind = ANTHROPIC.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    found = {"type": kind, "message": message} | ({"details": error.details} if error.details else {})
    return {"type": "error", "error": found, "request_id": request_id}


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
        if isinstance(error, ConstraintError) and error.path and not IN_TEXT.fullmatch(error.path):
            path, what = f"{field}.{error.path}", error.message
        raise ApiError(400, f"{path:.{3 * SHOWN}}: {what}", path, "invalid_value") from error


@contextmanager
def of_deadline(own: Any) -> Iterator[None]:
    """Within, a request that its own `deadline` ends is its client's to change, and no failure of the server."""
    try:
        yield
    except ApiError as error:
        if error.code == "deadline" and own.deadline is not None:
            error.status, error.param = 408, "dinfer.deadline"
        raise


@contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Within, errors name fields as a client's API has them. `names`: of patterns of our names."""
    try:
        yield
    except ApiError as error:
        for pattern, name in names.items():
            if (param := error.param) and (found := re.match(rf"{pattern}(?=\.|$)", param)):
                error.param = found.expand(name) + param[found.end() :]
                error.message = error.message.replace(param, error.param, 1)
                break
        raise


def validated(kind: type[T], body: Any) -> T:
    """The request of a body that did not come by HTTP. Raises ApiError."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        errors = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise of_validation(RequestValidationError(errors, body=body)) from error


def of_validation(error: RequestValidationError) -> ApiError:
    """The first error in a body: its field, its value, and what the field must be."""
    told = _of_validation(error)
    told.malformed = True
    return told


def _of_validation(error: RequestValidationError) -> ApiError:
    # Of a field with several types, what fits best.
    first = max(error.errors(), key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    place, *inner = first["loc"]
    found = _fields(inner, error.body, missing=first["type"] == "missing") if place == "body" else map(str, inner)
    where = ".".join(found) or "body"
    if first["type"] == "missing":
        return invalid(where, " is missing", "missing_field")
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", None, "invalid_json")
    if where == "body" and isinstance(first.get("input"), bytes):
        return ApiError(400, "the header Content-Type must be application/json", "Content-Type", "invalid_value")
    if first["type"] == "extra_forbidden":  # the value may be a prompt
        return invalid(where, ": is not a field of this request: leave it out")
    what = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{named(where, first.get('input'))}: {what}", where, "invalid_value")


def _fields(loc: Sequence[Any], node: Any, *, missing: bool) -> Iterator[str]:
    """The fields of a place in a body, without pydantic's names of types. `missing`: the last one is null or absent."""
    for part in loc[:-1] if missing else loc:
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int)):
            node = node[part]
            yield str(part)
    if missing and loc:
        yield str(loc[-1])
