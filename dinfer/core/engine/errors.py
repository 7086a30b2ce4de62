"""Why a request or a whole engine ends without an answer. They stand apart, so a command knows them without torch."""


class NonFiniteLogits(RuntimeError):
    """The model produced NaN or infinite logits for a request."""


class RankFailed(RuntimeError):
    """A rank of tensor parallelism has died, hangs, or met an error. The other ranks have ended too."""


class StalledRow(RuntimeError):
    """Step after step, a request committed no token and left no block."""


class BrokenContract(RuntimeError):
    """A component did what its contract excludes."""


class RequestAborted(RuntimeError):
    """A request was aborted before it began."""


class Unready(RuntimeError):
    """The engine takes no requests for now, and its message says what it waits for."""
