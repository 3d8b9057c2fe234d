import asyncio
from collections.abc import AsyncIterator

import pytest

from cluster.board import LocalBoard, Registration
from cluster.protocol.errors import LinkClosed, Unavailable
from cluster.protocol.local import LocalTransport
from cluster.protocol.messages import Hello
from cluster.protocol.transport import Link
from cluster.simulator.data_plane import until
from router.discovery import Discovery


class Neighbourhood:
    """A board with a clock of its own, replicas that only listen, and routers that only discover."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.board = LocalBoard(lambda: self.now_s)
        self.transport = LocalTransport()
        self.linked: dict[str, set[str]] = {}  # router -> replicas
        self.sessions: dict[str, int] = {}
        self.discoveries: list[Discovery] = []
        self.listeners: dict[str, object] = {}

    async def replica(self, name: str, pool: str = "verifier") -> None:
        hello = Hello(pool, name)
        self.listeners[name] = await self.transport.listen(hello, self._hold)
        await self.board.renew(Registration(name, pool, self.listeners[name].address, hello))

    async def _hold(self, link: Link) -> None:
        try:
            while True:
                await link.receive()
        except LinkClosed:
            pass

    def router(self, name: str) -> Discovery:
        hello = Hello("router", name)
        linked = self.linked[name] = set()

        async def serve(link: Link) -> None:
            linked.add(link.peer.replica_id)
            try:
                await self._hold(link)
            finally:
                linked.discard(link.peer.replica_id)
                await link.close()

        discovery = Discovery(
            self.transport,
            self.board,
            hello,
            lambda: self.now_s,
            lambda: Registration(name, "router", "", hello),
            serve,
            lambda replica_id: self.sessions.get(replica_id, 0),
        )
        self.discoveries.append(discovery)
        return discovery

    async def poll(self, rounds: int = 3) -> None:
        for _ in range(rounds):
            for discovery in self.discoveries:
                await discovery.poll()


@pytest.fixture
async def around() -> AsyncIterator[Neighbourhood]:
    around = Neighbourhood()
    yield around
    for discovery in around.discoveries:
        await discovery.close()


async def test_one_router_takes_every_verifier_and_drafter(around: Neighbourhood) -> None:
    for name in ("v0", "v1"):
        await around.replica(name)
    await around.replica("d0", "drafter")
    around.router("r0")
    await around.poll()
    await until(lambda: around.linked["r0"] == {"v0", "v1", "d0"})


async def test_routers_share_the_verifiers_and_all_see_every_drafter(around: Neighbourhood) -> None:
    for name in ("v0", "v1", "v2"):
        await around.replica(name)
    await around.replica("d0", "drafter")
    for name in ("r0", "r1"):
        await around.router(name).poll()
    await around.poll()
    await until(lambda: sum(len(linked) for linked in around.linked.values()) == 3 + 2)
    assert around.linked["r0"] & around.linked["r1"] == {"d0"}
    assert sorted(len(linked) for linked in around.linked.values()) == [2, 3]


async def test_a_new_router_gets_its_share_of_idle_verifiers_only(around: Neighbourhood) -> None:
    for name in ("v0", "v1"):
        await around.replica(name)
    around.router("r0")
    await around.poll()
    await until(lambda: len(around.linked["r0"]) == 2)
    around.sessions = {"v0": 1, "v1": 1}
    around.router("r1")
    await around.poll()
    assert around.linked["r0"] == {"v0", "v1"}, "nothing is stolen from under a session"
    around.sessions = {"v0": 1}
    await around.poll()
    await until(lambda: around.linked == {"r0": {"v0"}, "r1": {"v1"}})


async def test_a_dead_routers_verifier_is_taken_over_when_its_lease_has_run_out(around: Neighbourhood) -> None:
    await around.replica("v0")
    await around.board.lease("v0", "dead router")
    around.router("r0")
    await around.poll()
    assert around.linked["r0"] == set()
    around.now_s = 5.1
    await around.replica("v0")
    await around.poll()
    await until(lambda: around.linked["r0"] == {"v0"})


async def test_a_replica_that_comes_back_is_reached_at_its_new_address(around: Neighbourhood) -> None:
    await around.replica("v0")
    around.router("r0")
    await around.poll()
    await until(lambda: around.linked["r0"] == {"v0"})
    await around.listeners["v0"].close()
    await until(lambda: around.linked["r0"] == set())
    await around.poll()
    await around.replica("v0")
    for _ in range(20):
        around.now_s += 0.5
        await around.replica("v0")
        await around.poll(1)
        await asyncio.sleep(0)
    await until(lambda: around.linked["r0"] == {"v0"})


async def test_a_board_that_does_not_answer_changes_nothing(around: Neighbourhood) -> None:
    await around.replica("v0")
    discovery = around.router("r0")
    await around.poll()
    await until(lambda: around.linked["r0"] == {"v0"})

    async def silent(*_: object) -> None:
        raise Unavailable("no board")

    around.board.renew = silent
    await discovery.poll()
    assert around.linked["r0"] == {"v0"}
    assert discovery.listed == {"v0"}


async def test_leaving_frees_the_leases_at_once(around: Neighbourhood) -> None:
    await around.replica("v0")
    first = around.router("r0")
    await around.poll()
    await first.close()
    around.discoveries.remove(first)
    around.router("r1")
    await around.poll()
    await until(lambda: around.linked["r1"] == {"v0"})
