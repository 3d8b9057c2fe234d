import asyncio
from collections.abc import Sequence

from cluster.protocol.errors import LinkClosed
from cluster.protocol.messages import Close, Epoch, Hello, Message
from cluster.simulator.data_plane import until
from router.peer import Peer


class StuckLink:
    """A link whose peer takes nothing until told to."""

    peer = Hello("verifier", "v")

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.closed = asyncio.Event()
        self.batches: list[Sequence[Message]] = []

    async def send(self, messages: Sequence[Message]) -> None:
        await self.takes.wait()
        self.batches.append(messages)

    async def receive(self) -> Sequence[Message]:
        await self.closed.wait()
        raise LinkClosed("gone")

    async def close(self) -> None:
        self.closed.set()


def message(i: int) -> Close:
    return Close(f"s{i}", Epoch(0, 0), 0)


async def test_what_is_sent_while_the_writer_is_busy_rides_in_one_batch() -> None:
    link = StuckLink()
    peer = Peer(link, outbox_limit=100)
    running = asyncio.create_task(peer.run(lambda batch: None))
    peer.send(message(0))
    await asyncio.sleep(0)
    for i in range(1, 5):
        peer.send(message(i))
    link.takes.set()
    await until(lambda: sum(map(len, link.batches)) == 5)
    assert len(link.batches) <= 2
    peer.cut()
    await running


async def test_a_peer_that_takes_nothing_is_cut_off_and_costs_bounded_memory() -> None:
    link = StuckLink()
    peer = Peer(link, outbox_limit=10)
    running = asyncio.create_task(peer.run(lambda batch: None))
    await asyncio.sleep(0)
    for i in range(1000):
        peer.send(message(i))
    assert not peer.alive
    assert len(peer._outbox) <= 11
    await asyncio.wait_for(running, 5)
    assert link.closed.is_set()


async def test_run_returns_when_the_link_is_gone() -> None:
    link = StuckLink()
    peer = Peer(link, outbox_limit=10)
    running = asyncio.create_task(peer.run(lambda batch: None))
    await link.close()
    await asyncio.wait_for(running, 5)
    peer.send(message(1))
    assert not peer.alive
