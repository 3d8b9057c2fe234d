"""The errors that Outrider raises on purpose.

OutriderError
├── InvalidRequest      the client's fault; names the field and the limit (HTTP 400, INVALID_ARGUMENT)
├── NotFound            an unknown model or session (404, NOT_FOUND)
├── Overloaded          refused before any work; says when to retry (429/503, RESOURCE_EXHAUSTED)
├── Unavailable         no replica can take the work now (503, UNAVAILABLE)
├── ProtocolError       a peer sent something malformed; quarantines its session, never the stream
│   └── HandshakeRefused    the two sides do not fit; carries both sides' values
└── LinkClosed          the peer or the network is gone
"""


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""


class InvalidRequest(OutriderError):
    """What the client sent cannot be served. `field` names the offending field, None if no single one."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class NotFound(OutriderError):
    """The named model or session does not exist. `field` names the field that referred to it."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class Overloaded(OutriderError):
    """A bounded queue is full. Nothing has been done for this request."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """No replica can take the work, after a bounded wait."""


class ProtocolError(OutriderError):
    """A peer's message is malformed: says what was expected and what came."""


class HandshakeRefused(ProtocolError):
    """Both sides are well-formed but do not fit together, or the peer does not know the secret."""


class LinkClosed(OutriderError):
    """The link to a peer is gone; whatever was in flight on it may or may not have arrived."""
