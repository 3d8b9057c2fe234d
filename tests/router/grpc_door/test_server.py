"""The server around the methods: ports, health, reflection, leaving."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from cluster.protocol.errors import InvalidRequest
from cluster.simulator.data_plane import until
from cluster.simulator.scripted_generation import Burst, ScriptedGenerator
from router.grpc_door import server
from router.grpc_door.server import SERVICE, GrpcDoor
from router.http.front_door import FrontDoor
from router.http.text_codec import TextCodec
from tests.router.grpc_door.conftest import LIMIT_S

OpenDoor = Callable[..., FrontDoor]
HOST = "127.0.0.1"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_port_that_is_taken_is_refused_by_its_name(open_door: OpenDoor) -> None:
    first = await GrpcDoor.open(open_door(), HOST, 0)
    with pytest.raises(InvalidRequest, match=f"ingress.grpc_port: cannot listen at {HOST}:{first.port}"):
        await GrpcDoor.open(open_door(), HOST, first.port)
    await first.close()


async def test_replicas_of_one_node_share_a_port_and_any_free_port_is_one_by_itself(open_door: OpenDoor) -> None:
    first = await GrpcDoor.open(open_door(), HOST, 0, shared=True)
    second = await GrpcDoor.open(open_door(), HOST, first.port, shared=True)
    third = await GrpcDoor.open(open_door(), HOST, 0, shared=True)
    assert first.port == second.port != third.port
    async with grpc.aio.insecure_channel(f"{HOST}:{first.port}") as channel:
        await rpc.OutriderStub(channel).GetModelInfo(v1.GetModelInfoRequest(), timeout=LIMIT_S)
    for door in (first, second, third):
        await door.close()


async def test_health_follows_whether_requests_can_be_served(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEALTH_EVERY_S", 0.01)
    serving = [True]
    opened = await GrpcDoor.open(open_door(healthy=lambda: serving[-1]), HOST, 0)
    async with grpc.aio.insecure_channel(f"{HOST}:{opened.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=LIMIT_S)
        seen = [(await watch.read()).status]
        for now in (False, True):
            serving.append(now)
            seen.append((await watch.read()).status)
        assert seen == [SERVING, NOT_SERVING, SERVING]
        for service in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
            assert answer.status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="another"), timeout=LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        closing = asyncio.create_task(opened.close())
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await closing


async def test_reflection_describes_the_service_and_its_messages(open_door: OpenDoor) -> None:
    opened = await GrpcDoor.open(open_door(), HOST, 0)
    async with grpc.aio.insecure_channel(f"{HOST}:{opened.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        names, files = [answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=LIMIT_S)]
        assert {s.name for s in names.list_services_response.service} >= {SERVICE, "grpc.health.v1.Health"}
        described = FileDescriptorProto.FromString(files.file_descriptor_response.file_descriptor_proto[0])
        assert {"GenerateRequest", "GenerateResponse"} <= {message.name for message in described.message_type}
    await opened.close()


async def test_a_server_that_leaves_refuses_what_is_new_and_lets_the_rest_end(
    open_door: OpenDoor, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    generator.script = [Burst(codec.encode("a")), None]
    opened = await GrpcDoor.open(open_door(), HOST, 0)
    async with grpc.aio.insecure_channel(f"{HOST}:{opened.port}") as channel:
        stub = rpc.OutriderStub(channel)
        call = stub.Generate(v1.GenerateRequest(text="x"), timeout=LIMIT_S)
        await call.read()
        closing = asyncio.create_task(opened.close(drain_s=LIMIT_S))
        await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(v1.GetLoadRequest(), timeout=LIMIT_S)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not closing.done()
        await generator.opened[0].abandon()  # nobody asked the door to abort: its end is an error of the stream
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() == grpc.StatusCode.INTERNAL
        await closing


async def test_what_does_not_end_in_time_is_cancelled_and_freed(
    open_door: OpenDoor, generator: ScriptedGenerator, codec: TextCodec
) -> None:
    generator.script = [Burst(codec.encode("a")), None]
    front = open_door()
    opened = await GrpcDoor.open(front, HOST, 0)
    async with grpc.aio.insecure_channel(f"{HOST}:{opened.port}") as channel:
        call = rpc.OutriderStub(channel).Generate(v1.GenerateRequest(text="x"), timeout=LIMIT_S)
        await call.read()
        await opened.close(drain_s=0.05)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    await until(lambda: front.load.running == 0)
    assert generator.opened[0].abandoned == 1
