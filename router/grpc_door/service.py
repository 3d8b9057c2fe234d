"""The methods of outrider.v1, on the same path of generation as HTTP.

Knows nothing of servers and ports. The invariant: however a call ends, all its sessions have been released.
"""

import asyncio
from contextlib import aclosing
from importlib.metadata import version
from typing import TypeAlias

import grpc

from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc
from cluster.protocol.errors import InvalidRequest, NotFound, Unavailable
from router.grpc_door.calls import RunningCalls
from router.grpc_door.requests import body_of, form_of, refuse_unknown
from router.grpc_door.responses import chunk, complete, speculative
from router.grpc_door.status import answered
from router.http.answer import Answer
from router.http.front_door import FrontDoor
from router.http.intake import side_by_side, take_in
from router.http.request_id import is_tame

Context: TypeAlias = grpc.aio.ServicerContext


class OutriderService(rpc.OutriderServicer):
    def __init__(self, door: FrontDoor) -> None:
        self._door = door
        self._calls = RunningCalls()

    async def Generate(self, request: v1.GenerateRequest, context: Context) -> None:
        request_id = request.request_id or self._door.new_session_id()
        await answered(context, request_id, self._generate(request, request_id, context))

    async def Abort(self, request: v1.AbortRequest, context: Context) -> v1.AbortResponse:
        return await answered(context, request.request_id, self._abort(request.request_id))

    async def GetModelInfo(self, request: v1.GetModelInfoRequest, context: Context) -> v1.GetModelInfoResponse:
        limits, codec = self._door.limits, self._door.codec
        return v1.GetModelInfoResponse(
            served_model_name=limits.model,
            max_context_length=limits.max_model_len,
            vocab_size=codec.vocab_size,
            eos_token_ids=codec.eos_ids,
            drafters=limits.drafters,
            version=version("outrider"),
        )

    async def GetLoad(self, request: v1.GetLoadRequest, context: Context) -> v1.GetLoadResponse:
        door = self._door
        return v1.GetLoadResponse(
            replica_id=door.replica_id,
            num_requests=door.load.running,
            max_requests=door.load.cap,
            speculative=speculative(*door.metrics.speculated()),
            replicas=[v1.ReplicaLoad(replica_id=m.replica_id, pool=m.pool, gauges=m.stats) for m in door.members()],
        )

    async def _generate(self, request: v1.GenerateRequest, request_id: str, context: Context) -> None:
        door = self._door
        if not is_tame(request_id):
            raise InvalidRequest("request_id: must be 1 to 128 printable ASCII characters", "request_id")
        door.load.check()
        if door.limits.strict:
            refuse_unknown(request)
        prepared, _ = await take_in(body_of(request), form_of(request), door)
        answers = [Answer(door, prepared, choice) for choice in range(prepared.choices)]
        with self._calls.entered(request_id, answers):
            await context.send_initial_metadata((("x-request-id", request_id),))
            async with aclosing(side_by_side(answers, door)) as numbered:
                async for index, piece in numbered:
                    response = v1.GenerateResponse(request_id=request_id)
                    if piece is None:
                        response.complete.CopyFrom(complete(index, answers[index], door.codec))
                    elif piece.text or piece.token_ids:
                        response.chunk.CopyFrom(chunk(index, piece, door.codec))
                    else:
                        continue
                    await self._write(response, context)

    async def _write(self, response: v1.GenerateResponse, context: Context) -> None:
        try:
            async with asyncio.timeout(self._door.write_timeout_s):
                await context.write(response)
        except TimeoutError as error:
            raise Unavailable(f"nothing was read for {self._door.write_timeout_s:g} s") from error

    async def _abort(self, request_id: str) -> v1.AbortResponse:
        if not await self._calls.abort(request_id):
            raise NotFound(f"request_id: nothing runs as {request_id[:200]!r}", "request_id", "request_not_found")
        return v1.AbortResponse()
