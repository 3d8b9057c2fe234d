"""What starts replicas leaves behind no thread that has computed."""

import asyncio
import threading

from cluster.assembly import _on_a_passing_thread


async def test_a_model_is_loaded_on_a_thread_that_ends() -> None:
    loading = await _on_a_passing_thread(threading.current_thread)
    assert loading is not threading.current_thread()
    await asyncio.to_thread(loading.join, 10.0)
    assert not loading.is_alive()
