"""Logs for machines: each record is a line of JSON with the id of its request."""

import json
import logging
from contextvars import ContextVar

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
FIELDS = ("method", "path", "status", "seconds", "model", "prompt")  # optional fields of a record


def log_as_json() -> None:
    """Makes dinfer and uvicorn log to stderr in JSON, a record a line. Requests are logged unless -q is given."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("dinfer", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    serving = logging.getLogger("dinfer.serving")
    if serving.isEnabledFor(logging.WARNING):
        serving.setLevel(logging.INFO)


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the request's id, and the record's `FIELDS`."""

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
