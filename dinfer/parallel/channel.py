"""Messages between two processes over a Unix socket: JSON, preceded by its length."""

import json
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("<I")


class Channel:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._sending = threading.Lock()
        self._held = bytearray()

    def send(self, *message: Any) -> None:
        """Raises OSError if the other end is gone."""
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self.socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Any]:
        """Waits for the next message. Raises EOFError or OSError if the other end is gone."""
        while (message := self._whole()) is None:
            self._fill()
        return message

    def arrived(self) -> list[list[Any]]:
        """The complete messages of one read from the socket. Raises as `receive`."""
        self._fill()
        found = []
        while (message := self._whole()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        """Closes the connection, which wakes up the threads that wait at both ends."""
        with suppress(OSError):  # the other end was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def _fill(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the other process is gone")
        self._held += data

    def _whole(self) -> list[Any] | None:
        if len(self._held) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._held)[0]
        if len(self._held) < end:
            return None
        data = bytes(self._held[LENGTH.size : end])
        del self._held[:end]
        found: list[Any] = json.loads(data)
        return found
