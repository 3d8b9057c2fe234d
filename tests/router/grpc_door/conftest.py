"""The gRPC door in front of the same doors that the HTTP tests open, and a channel to it."""

import string
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import grpc
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from router.grpc_door.server import GrpcDoor
from router.http.front_door import FrontDoor
from tests.router.http.conftest import codec, generator, open_door, say

__all__ = ["codec", "generator", "open_door", "say"]

LETTERS = string.ascii_letters + string.digits + ".,"  # one token each, as many as the law of a DataPlane has
LIMIT_S = 10.0  # for everything that must happen, so that a failure is no hang

Calling = Callable[[FrontDoor], Awaitable[rpc.OutriderStub]]


@pytest.fixture
def letters_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture
async def calling() -> AsyncIterator[Calling]:
    """Opens a gRPC door on the front door given, and gives a client of it."""
    async with AsyncExitStack() as stack:

        async def call(door: FrontDoor) -> rpc.OutriderStub:
            opened = await GrpcDoor.open(door, "127.0.0.1", 0)
            stack.push_async_callback(opened.close, 0.0)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{opened.port}"))
            return rpc.OutriderStub(channel)

        yield call


class Told:
    """What a client has read of one call, choice by choice."""

    def __init__(self) -> None:
        self.chunks: list[v1.GenerateChunk] = []
        self.complete: dict[int, v1.GenerateComplete] = {}

    async def read(self, call: grpc.aio.UnaryStreamCall) -> "Told":
        while (response := await call.read()) is not grpc.aio.EOF:
            if response.WhichOneof("response") == "chunk":
                assert response.chunk.index not in self.complete, "a chunk behind the end"
                self.chunks.append(response.chunk)
            else:
                assert response.complete.index not in self.complete, "a second end"
                self.complete[response.complete.index] = response.complete
        return self

    def text(self, index: int = 0) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [token for chunk in self.chunks if chunk.index == index for token in chunk.token_ids]

    def logprobs(self, index: int = 0) -> list[v1.TokenLogprob]:
        return [token for chunk in self.chunks if chunk.index == index for token in chunk.logprobs]


async def told(stub: rpc.OutriderStub, request: v1.GenerateRequest) -> Told:
    return await Told().read(stub.Generate(request, timeout=LIMIT_S))
