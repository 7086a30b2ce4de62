"""Logs for machines: a line of JSON each, with the id of the request that it is about."""

import json
import logging
from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
FIELDS = ("method", "path", "status", "seconds", "model", "prompt")  # what a record may have beside its message


def log_as_json() -> None:
    """Lets dinfer and uvicorn log to stderr, each record as a line of JSON. Requests are logged unless -q is given."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("dinfer", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    serving = logging.getLogger("dinfer.serving")
    if serving.isEnabledFor(logging.WARNING):
        serving.setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the request's id, and what the record has of `FIELDS`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get(),
            **{name: value for name, value in vars(record).items() if name in FIELDS},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)
