"""An Outrider server over gRPC, as a load sees it. Knows nothing of time.

An answer counts as whole when the call has ended well behind its `complete`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from cluster.bench.load.endpoint import AskFailed, CouldNotRun, Told
from cluster.check.answer import Ask
from cluster.protocol import outrider_v1_pb2 as v1
from cluster.protocol import outrider_v1_pb2_grpc as rpc

CONNECT_TIMEOUT_S = 30.0


class GrpcEndpoint:
    """`address` is host:port; `model` "" = whatever is served. One channel carries all requests."""

    def __init__(
        self, address: str, *, model: str = "", api_key: str = "", connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = rpc.OutriderStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def connect(self) -> Mapping[str, Any]:
        try:
            info = await self._stub.GetModelInfo(
                v1.GetModelInfoRequest(), timeout=self._connect_timeout_s, wait_for_ready=True, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise CouldNotRun(f"{error.code().name}: {error.details()}") from error
        return {"door": "grpc", "model": info.served_model_name, "version": info.version}

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self, ask: Ask, on_tokens: Callable[[], None]) -> Told:
        call = self._stub.Generate(self._request(ask), metadata=self._metadata)
        complete = None
        try:
            async for response in call:
                if response.WhichOneof("response") == "complete":
                    complete = response.complete
                elif response.chunk.token_ids:
                    on_tokens()
        except grpc.aio.AioRpcError as error:
            raise AskFailed(error.code().name, str(error.details())) from error
        if complete is None:
            raise AskFailed("cut off", "the call ended without a complete answer")
        return _told(complete)

    def _request(self, ask: Ask) -> v1.GenerateRequest:
        said = dict(ask.extra)
        speculation = said.pop("speculation", {})
        request = v1.GenerateRequest(
            sampling_params={"max_tokens": ask.max_tokens, "temperature": ask.temperature, **said},
            speculation=speculation,
        )
        if self._model:
            request.model = self._model
        if isinstance(ask.prompt, str):
            request.text = ask.prompt
        else:
            request.chat.messages.extend(v1.ChatMessage(**message) for message in ask.prompt)
        return request


def _told(complete: v1.GenerateComplete) -> Told:
    usage, drafts = complete.usage, complete.speculative
    return Told(
        usage.prompt_tokens,
        usage.completion_tokens,
        drafts.num_accepted_tokens,
        drafts.num_draft_tokens - drafts.num_accepted_tokens,
        drafts.num_drafts,
    )
