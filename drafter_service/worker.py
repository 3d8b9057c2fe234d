"""One thread that computes, beside an event loop that must not.

Knows nothing of drafts. Jobs run one after the other in the order given, so what only jobs touch needs no locks. A
daemon thread: a job that hangs must not keep the process from ending.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, job: Callable[..., T], *args: Any) -> T:
        """The job's result; raises what it raises. A caller that stops waiting does not stop the job."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():  # cancelled: nobody waits
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # a job may return None

        def work() -> None:
            try:
                outcome = (job(*args), None)
            except Exception as error:  # noqa: BLE001 - carried to the caller, who decides
                outcome = (None, error)  # type: ignore[assignment]
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, *outcome)

        self._jobs.put(work)
        return await future

    def stop(self) -> None:
        """Ends the thread after the jobs already given; does not wait for them."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
