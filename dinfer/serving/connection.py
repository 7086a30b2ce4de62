"""Connections of clients: a limit of time for the head of a request, and of files for the process."""

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from dinfer.serving.settings import Settings

LOG = logging.getLogger("dinfer.serving")
OTHERS = 256  # files that the process has open beside its connections


def connection(settings: Settings) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol. It also closes a connection whose client sends the head of its request too slowly."""

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._await_head()
            else:
                self._stop()

        def connection_lost(self, error: Exception | None) -> None:
            self._stop()
            super().connection_lost(error)

        def _await_head(self) -> None:
            if self._late is None:
                self._late = asyncio.get_running_loop().call_later(settings.send_timeout, self.transport.close)

        def _stop(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Connection


def open_files(settings: Settings) -> None:
    """Raises the process's limit of open files to fit `max_connections`, and warns if the system does not allow it."""
    need, (soft, hard) = settings.max_connections + OTHERS, resource.getrlimit(resource.RLIMIT_NOFILE)
    most: Any = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < need:
        LOG.warning(
            "the process may open %d files, too few for max_connections=%d: raise `ulimit -n`, or lower it", most,
            settings.max_connections,
        )  # fmt: skip
