"""The board in a named Ray actor, shared by all processes of one application.

Knows nothing of what is on it (board.py). A board that died comes back empty and is rebuilt by the next renewals; calls
in the meantime raise Unavailable.
"""

import asyncio
import time
from typing import Any

import ray
import ray.exceptions

from cluster.board import LocalBoard, Pool, Registration
from cluster.protocol.errors import Unavailable

NAMESPACE = "outrider"
CALL_TIMEOUT_S = 2.0


def _create(name: str) -> Any:
    actor = ray.remote(num_cpus=0, max_restarts=-1)(LocalBoard)
    # Detached: the board belongs to the application, not to the replica that happened to ask first.
    options = actor.options(name=name, namespace=NAMESPACE, get_if_exists=True, lifetime="detached")
    return options.remote(time.monotonic)


class RayBoard:
    """A Board whose state lives in the actor `board:{application}`. Needs a connected Ray driver or worker."""

    def __init__(self, application: str) -> None:
        self._name = f"board:{application}"
        self._actor: Any = None

    async def renew(self, registration: Registration) -> None:
        await self._call("renew", registration)

    async def leave(self, replica_id: str) -> None:
        await self._call("leave", replica_id)

    async def members(self, *pools: Pool) -> tuple[Registration, ...]:
        found: tuple[Registration, ...] = await self._call("members", *pools)
        return found

    async def lease(self, verifier_id: str, router_id: str) -> bool:
        return bool(await self._call("lease", verifier_id, router_id))

    async def release(self, verifier_id: str, router_id: str) -> None:
        await self._call("release", verifier_id, router_id)

    async def _call(self, method: str, *args: object) -> Any:
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(_create, self._name)
            return await asyncio.wait_for(getattr(self._actor, method).remote(*args), CALL_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._actor = None  # a handle to a dead actor never recovers; ask for it by name next time
            raise Unavailable(f"the board does not answer: {type(error).__name__}") from error


def remove(application: str) -> None:
    """End the application's board; nothing happens when there is none."""
    try:
        ray.kill(ray.get_actor(f"board:{application}", namespace=NAMESPACE))
    except ValueError:
        return
