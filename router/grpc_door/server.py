"""The gRPC server of one ingress replica: outrider.v1 with standard health and reflection.

Owns the port. Knows nothing of requests. The invariant: health says whether a request could be served within the last
second, and says no for good from the moment the server begins to close.
"""

import asyncio
import contextlib
import os

# Read by gRPC when it is first imported: its fork handlers can deadlock a process that starts children.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from cluster.protocol.errors import InvalidRequest
from router.grpc_door.service import OutriderService
from router.http.front_door import FrontDoor

SERVICE = v1.DESCRIPTOR.services_by_name["Outrider"].full_name
_SERVED = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
HEALTH_EVERY_S = 1.0
DRAIN_S = 15.0  # Serve ends a replica 20 s after it was told to leave
# Calls that are no generations, which have a cap of their own: watches of health, reflection, aborts.
_OTHER_CALLS = 256


class GrpcDoor:
    """Close it before its event loop ends: gRPC deadlocks when it collects a running server afterwards."""

    def __init__(self, server: grpc.aio.Server, port: int, health_servicer: health.aio.HealthServicer) -> None:
        self._server = server
        self.port = port
        self._health = health_servicer
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, door: FrontDoor, host: str, port: int, shared: bool = False) -> "GrpcDoor":
        """Port 0 is any free one. A shared port may be open in other processes too: the system then spreads connections
        over them. Raises InvalidRequest for a port that cannot be had."""
        server = grpc.aio.server(options=_options(door, shared), maximum_concurrent_rpcs=door.load.cap + _OTHER_CALLS)
        rpc.add_OutriderServicer_to_server(OutriderService(door), server)  # type: ignore[no-untyped-call]
        servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        reflection.enable_server_reflection(_SERVED, server)
        try:
            bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise InvalidRequest(f"ingress.grpc_port: cannot listen at {host}:{port}", "ingress.grpc_port") from error
        opened = cls(server, bound, servicer)
        await opened._set_health(door.healthy())
        await server.start()
        opened._watching = asyncio.create_task(opened._keep_health(door), name="health of the gRPC door")
        return opened

    async def close(self, drain_s: float = DRAIN_S) -> None:
        """Refuse what is new; what runs has `drain_s` to end."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        await self._health.enter_graceful_shutdown()
        await self._server.stop(drain_s)

    async def _keep_health(self, door: FrontDoor) -> None:
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            await self._set_health(door.healthy())

    async def _set_health(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for service in ("", SERVICE):
            await self._health.set(service, states.SERVING if serving else states.NOT_SERVING)


def _options(door: FrontDoor, shared: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", door.max_body_bytes),
        ("grpc.so_reuseport", int(shared)),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping as often as that, with and without calls; more is a reason to hang up.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]
