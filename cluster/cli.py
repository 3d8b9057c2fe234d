"""The `outrider` command. Heavy imports happen inside the commands, so that --help answers at once."""

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from cluster.config import Config, load_config
from cluster.protocol.errors import OutriderError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve a large language model by draft-then-verify: the target's own text, only faster.",
)

ConfigArgument = Annotated[
    Path | None, typer.Argument(help="YAML configuration; without one the embedded default model is served.")
]

bench = typer.Typer(no_args_is_help=True, help="Measure a server under load, or the verifier's engine alone.")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point: expected errors end with one readable message and exit code 1."""
    try:
        app()
    except OutriderError as error:
        print(f"outrider: {error}", file=sys.stderr)
        raise SystemExit(1) from error


@app.command()
def serve(
    config: ConfigArgument = None,
    address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster (host:port or 'auto'); default: start a local Ray.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of HTTP and gRPC; default from the configuration.")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; default from the configuration.")] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="gRPC port, 0 for any free one; default from the configuration."),
    ] = None,
) -> None:
    """Serve until Ctrl-C, then stop everything that was started."""

    from cluster.launch import application, ray_cluster

    settings = _with_ingress(load_config(config), host=host, port=port, grpc_port=grpc_port)
    _prepare_models(settings)
    stop = _stop_on_signals(threading.Event())
    with ray_cluster(settings, address), application(settings, _report) as url:
        model = settings.target.model_loading_config.model_id
        _report(f"ready: {url}/v1 serves {model!r}; drafters: {', '.join(d.name for d in settings.drafters) or 'none'}")
        if settings.ingress.grpc_port:
            _report(f"gRPC: {settings.ingress.host}:{settings.ingress.grpc_port} serves outrider.v1")
        _report(
            f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' -d "
            f'\'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}\''
        )
        stop.wait()
        _report("stopping ...")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    config: Annotated[Path | None, typer.Option(help="YAML configuration.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    depth: Annotated[int | None, typer.Option(min=0, max=64, help="Draft tokens per round at most.")] = None,
    drafter: Annotated[str, typer.Option(help="Name of a drafter of the configuration.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it stands, without chat template.")
    ] = False,
) -> None:
    """Answer one prompt in this process, without Ray or HTTP."""
    import asyncio

    from cluster.generate import GenerateOptions, run_generate

    settings = load_config(config)
    _prepare_models(settings)
    options = GenerateOptions(prompt, max_tokens, temperature, seed, depth, drafter, raw)
    asyncio.run(run_generate(settings, options))


@app.command()
def check(
    url: Annotated[str, typer.Argument(help="The server to check: its root or its /v1.")],
    against: Annotated[
        str, typer.Option(help="The same weights without speculation, on another server; default: URL itself is asked.")
    ] = "",
    model: Annotated[str, typer.Option(help="Model name; default: the first that the server lists.")] = "",
    draws: Annotated[int, typer.Option(min=50, help="Texts drawn on each side of the sampling law.")] = 300,
    budget_s: Annotated[float, typer.Option(min=1.0, help="Seconds for everything; what is left out is told.")] = 300.0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Log-probabilities closer than this are equal: 0.001 float32, 0.1 bfloat16.")
    ] = 1e-3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OUTRIDER_CHECK_API_KEY", show_envvar=True, help="Bearer token for both servers.")
    ] = "",
) -> None:
    """Prove or refute that speculation leaves a server's text alone.

    Sends the same requests with speculation and without, and compares:
    greedy text, seeded text, the law of sampled text, parameters inside
    blocks (stop, max_tokens, min_tokens, logit_bias, penalties, ...),
    log-probabilities and usage. Any OpenAI-compatible server will do; what
    it does not support is skipped with the reason, and never passed.

    The request field "speculation": {"enabled": false} turns speculation
    off; for servers without that field name a second one with --against.

    Exit code: 0 no violation, 1 a violation, 2 it could not be told.
    """
    from cluster.check.command import check_endpoint
    from cluster.check.run import Options

    options = Options(url, against, model, draws, budget_s, tolerance)
    raise typer.Exit(check_endpoint(options, api_key, json_file))


@bench.command("load")
def bench_load(
    url: Annotated[str, typer.Argument(help="http://host:port or grpc://host:port.")],
    rate: Annotated[float, typer.Option(min=1e-3, help="Arrivals per second, on average.")] = 1.0,
    duration_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds of arrivals; what is out then is waited for.")
    ] = 60,
    workload: Annotated[
        str, typer.Option(help="mixed, copy, open, chat, or a YAML file of tenants (docs/bench.md).")
    ] = "mixed",
    max_in_flight: Annotated[int, typer.Option(min=1, help="Arrivals beyond it are dropped, and told.")] = 256,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="From the scheduled arrival to the whole answer.")] = 120.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests at the same times.")] = 0,
    model: Annotated[str, typer.Option(help="Model name; default: the first that the server lists.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it to this .png, .svg or .pdf.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OUTRIDER_BENCH_API_KEY", show_envvar=True, help="Bearer token for the server.")
    ] = "",
) -> None:
    """Send requests at random times, as many independent clients would, and measure what they get.

    Arrivals are a Poisson process that does not wait for answers. Latencies
    count from the scheduled arrival; every arrival is accounted for.

    Exit code: 0 something was answered, 1 nothing was, or nothing could run.
    """
    from cluster.bench.load.command import bench_load as run
    from cluster.bench.load.run import Options

    options = Options(url, rate, duration_s, max_in_flight, timeout_s, seed, model)
    if not run(options, workload, api_key, json_file, picture):
        raise typer.Exit(1)


@bench.command("engine")
def bench_engine(
    config: ConfigArgument = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
    baseline: Annotated[bool, typer.Option("--baseline", help="Take turns with transformers' own forward.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it to this .png, .svg or .pdf.")] = None,
) -> None:
    """Measure the target's passes and the verifier's engine alone, in this process.

    The time of a pass against its tokens and the cached ones, against the
    floor (bytes that it must read over the measured bandwidth of memory) and
    against transformers; tokens per second of many streams; peak memory.
    """
    from cluster.bench.engine.command import bench_engine as run

    run(load_config(config), quick, baseline, json_file, picture)


@app.command()
def demo() -> None:
    """Start drafter and verifier processes, stream one answer with and without speculation, stop."""
    from cluster.demo import run_demo

    if not run_demo(_report):
        raise typer.Exit(1)


@app.command("truncate")
def truncate(
    layers: Annotated[int, typer.Option(min=1, help="How many of the target's first layers to keep.")],
    out: Annotated[Path, typer.Option(help="Directory to write; use it as a draft_model's model_source.")],
    source: Annotated[str, typer.Option(help="Target: directory, hub id or the embedded default.")] = "",
) -> None:
    """Make a draft model of the target's own first layers and head."""
    from cluster.config import DEFAULT_MODEL
    from cluster.model_store import resolve
    from drafter_service.training.truncate import save_truncated

    save_truncated(resolve(source or DEFAULT_MODEL), layers, out)
    _report(f"wrote {out}")


@app.command()
def validate(config: Annotated[Path, typer.Argument(help="YAML configuration to check.")]) -> None:
    """Check a configuration without starting anything."""
    load_config(config)
    _report(f"{config}: valid")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _with_ingress(settings: Config, **given: object) -> Config:
    update = {name: value for name, value in given.items() if value is not None}
    return settings.model_copy(update={"ingress": settings.ingress.model_copy(update=update)})


def _prepare_models(settings: Config) -> None:
    """Fetch or convert models here, where a person sees the progress, before replicas need them."""
    from cluster.model_store import resolve

    resolve(settings.target.model_loading_config.model_source)
    for drafter in settings.drafters:
        if drafter.model_source:
            resolve(drafter.model_source)


def _stop_on_signals(stop: threading.Event) -> threading.Event:

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


if __name__ == "__main__":
    main()
