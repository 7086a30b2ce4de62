"""Errors in the form of OpenAI's API."""

from dataclasses import dataclass
from typing import Any

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(slots=True)
class ApiError(Exception):
    """An error for the client: HTTP status, a sentence, the field at fault, and a code for programs."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        # A client's words may hold half of a surrogate pair.
        message, param = (
            None if t is None else t.encode(errors="backslashreplace").decode() for t in (self.message, self.param)
        )
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}


def refused(field: str, value: Any, reason: str) -> ApiError:
    """The error for a value that this server, model or recipe cannot honour."""
    return ApiError(400, f"{field}={value!r:.80} {reason}", field, "unsupported_value")
