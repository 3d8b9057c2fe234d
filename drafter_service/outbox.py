"""The way out to one peer: messages pile up while a send is under way and leave together, whole and in order.

Keeps a slow peer from holding up the others: putting never waits. Bounded in messages and in time; a peer that exceeds
either loses its link, and with it its sessions.
"""

import asyncio
import logging
from collections.abc import Sequence

from cluster.protocol.errors import LinkClosed
from cluster.protocol.messages import Message
from cluster.protocol.transport import Link

logger = logging.getLogger(__name__)


class Outbox:
    def __init__(self, link: Link, max_messages: int, send_timeout_s: float = 5.0) -> None:
        self._link = link
        self._max_messages = max_messages
        self._send_timeout_s = send_timeout_s
        self._messages: list[Message] = []
        self._filled = asyncio.Event()
        self._overflown = False

    def put(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)
        self._overflown = self._overflown or len(self._messages) > self._max_messages
        self._filled.set()

    async def run(self) -> None:
        """Sends until the link is gone or the peer does not keep up; the link is closed on return."""
        try:
            while not self._overflown:
                await self._filled.wait()
                self._filled.clear()
                batch, self._messages = self._messages, []
                await asyncio.wait_for(self._link.send(batch), self._send_timeout_s)
            logger.warning("%s %s left %d answers unread", *self._peer(), self._max_messages)
        except TimeoutError:
            logger.warning("%s %s took nothing for %g s", *self._peer(), self._send_timeout_s)
        except LinkClosed:
            pass  # the reader notices too and ends the sessions
        finally:
            await self._link.close()

    def _peer(self) -> tuple[str, str]:
        return self._link.peer.role, self._link.peer.replica_id
