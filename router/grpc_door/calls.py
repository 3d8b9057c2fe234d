"""The Generate calls that run here, by id. Knows nothing of gRPC.

The invariant: an id names at most one running call.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster.protocol.errors import InvalidRequest
from router.http.answer import Answer


class RunningCalls:
    def __init__(self) -> None:
        self._answers: dict[str, Sequence[Answer]] = {}

    @contextmanager
    def entered(self, request_id: str, answers: Sequence[Answer]) -> Iterator[None]:
        """Raises InvalidRequest when a call of that id runs."""
        if request_id in self._answers:
            raise InvalidRequest(f"request_id: {request_id!r} is running already", "request_id", "request_id_in_use")
        self._answers[request_id] = answers
        try:
            yield
        finally:
            del self._answers[request_id]

    async def abort(self, request_id: str) -> bool:
        """End that call's answers where they stand; False when there is no such call."""
        if request_id not in self._answers:
            return False
        for answer in self._answers[request_id]:
            await answer.abort()
        return True
