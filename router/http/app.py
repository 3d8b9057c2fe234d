"""The routes of the HTTP front door. Knows nothing of how answers are made."""

from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.metrics import CONTENT_TYPE
from cluster.protocol.errors import NotFound, OutriderError
from router.http import tokenization
from router.http.chat import Chat
from router.http.completions import Completions
from router.http.dialect import serve
from router.http.front_door import FrontDoor
from router.http.http_errors import CLIENT_GONE, error_object, error_response, json_response
from router.http.request_id import RequestIdMiddleware


def create_app(door: FrontDoor) -> FastAPI:
    """The ASGI application of one front door. Bodies are read by our own code, so FastAPI's 422 cannot appear."""
    app = FastAPI(title="Outrider", openapi_url=None)
    app.add_middleware(RequestIdMiddleware)
    _add_error_handlers(app)
    _add_generation_routes(app, door)
    _add_model_routes(app, door)
    _add_operation_routes(app, door)
    return app


def _add_generation_routes(app: FastAPI, door: FrontDoor) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await serve(request, door, Completions())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await serve(request, door, Chat())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await tokenization.tokenize(request, door)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await tokenization.detokenize(request, door)


def _add_model_routes(app: FastAPI, door: FrontDoor) -> None:
    limits = door.limits
    model = {
        "id": limits.model,
        "object": "model",
        "created": int(door.now_s()),
        "owned_by": "outrider",
        "root": limits.model,
        "parent": None,
        "max_model_len": limits.max_model_len,
        "permission": [],
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != limits.model:
            raise NotFound(f"model {name[:200]!r} does not exist", "model", "model_not_found")
        return json_response(model)


def _add_operation_routes(app: FastAPI, door: FrontDoor) -> None:
    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        return Response(status_code=200 if door.healthy() else 503)

    @app.get("/version")
    async def outrider_version() -> Response:
        return json_response({"version": version("outrider")})

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": door.load.running})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(door.metrics.render(), media_type=CONTENT_TYPE)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(OutriderError)
    async def on_outrider_error(request: Request, error: OutriderError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        # Starlette's own: no such route, wrong method.
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return json_response(error_object(message, kind), error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def on_client_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)
