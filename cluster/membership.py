"""Keeps one replica on the board: renews its registration every second until it leaves."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from cluster.board import RENEW_EVERY_S, Board, Registration
from cluster.protocol.errors import Unavailable

logger = logging.getLogger(__name__)


class Membership:
    """Renews what `describe()` returns. A board that does not answer is tried again at the next renewal."""

    def __init__(self, board: Board, describe: Callable[[], Registration], every_s: float = RENEW_EVERY_S) -> None:
        self._board = board
        self._describe = describe
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    async def join(self) -> None:
        await self._renew()
        self._task = asyncio.create_task(self._keep_renewing(), name="membership")

    async def leave(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        with contextlib.suppress(Unavailable):  # then the registration expires
            await self._board.leave(self._describe().replica_id)

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._renew()

    async def _renew(self) -> None:
        try:
            await self._board.renew(self._describe())
        except Unavailable as error:
            logger.warning("not renewed: %s", error)
