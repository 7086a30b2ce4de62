"""The address of a server. It imports little, so that a port that is taken is known before a model is loaded."""

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from dinfer.serving.settings import Settings

PATIENCE = 1.0  # seconds in which Ray Serve must answer


def listen(settings: Settings) -> socket.socket:
    """The socket that the server will listen on. Raises an OSError that names the address."""
    made = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with naming(settings):
            made.bind((settings.host, settings.port))
    except OSError:
        made.close()
        raise
    return made


def check_free(settings: Settings) -> None:
    """Raises an OSError that names the address if something listens there but Ray Serve, which takes a new application.

    For replicas: until Ray has started, nothing else tells whether the port can be had.
    """
    try:
        listen(settings).close()
    except OSError as error:
        try:
            ask_ray_serve(url(settings.host, settings.port))
        except OSError:
            raise error from None


def ask_ray_serve(address: str) -> None:
    """Raises OSError unless Ray Serve listens at `address`."""
    with urllib.request.urlopen(f"{address}-/healthz", timeout=PATIENCE):
        pass


@contextmanager
def naming(settings: Settings) -> Iterator[None]:
    """Names the address in an error of its socket, and says what to do."""
    try:
        yield
    except OSError as error:
        where = f"host={settings.host} port={settings.port}"
        raise OSError(f"{where}: {error.strerror}. Choose another port, or port=0 for any free one") from error


def url(host: str, port: int) -> str:
    """The address of a page."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"
