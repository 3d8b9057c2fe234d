"""Why a cell of the table has no verdict. Each is told in the table; none is ever counted as passed."""

from cluster.protocol.errors import OutriderError


class NotCheckable(OutriderError):
    """This server does not offer what the cell needs. The message is the reason that the table shows."""


class OutOfTime(OutriderError):
    """The time budget was used up before the cell had its answers."""


class RequestFailed(OutriderError):
    """The server did not answer a request that it should have answered."""


class CouldNotRun(OutriderError):
    """Nothing can be checked at all: no server, no model, no access."""
