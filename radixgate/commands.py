"""The commands and their flags; what they do is in modules of their own."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from engine_workers.workspace import Workspace
from radixgate import __version__
from radixgate.cache_commands import app as cache_app
from radixgate.load_settings import configure_logging, load_settings

_GIB = 1024**3
_PASS_ON = {"allow_extra_args": True}

app = typer.Typer(
    name="radixgate",
    help="An OpenAI-compatible gateway that routes each request to the vLLM engine that already "
    "holds its KV cache. Every setting is also a RADIXGATE_ environment variable; flags win.",
    add_completion=False,
    # Plain text: examples keep their lines, and an error is one line that scripts can read.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(cache_app)

Host = Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")]
Port = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Port to listen on.  [default: 8080]")
]
Model = Annotated[
    str | None,
    typer.Option(help="Hugging Face model folder, or hub id.  [default: SmolLM2-135M-Instruct]"),
]
ChatTemplate = Annotated[
    Path | None, typer.Option(help="Jinja file to use instead of the model's own chat template.")
]
KvCacheGib = Annotated[
    float | None,
    typer.Option(min=0.05, help="GiB of KV cache of an engine on the CPU.  [default: 2]"),
]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Longest sequence in tokens.  [default: what fits]")
]
ToolCallParser = Annotated[
    str | None, typer.Option(help="vLLM's parser for the model's tool calls, e.g. hermes.")
]
Tiers = Annotated[
    str | None,
    typer.Option(
        help="Where KV blocks are kept, the fastest first: ram, then any of ssd, redis, s3.  "
        "[default: ram,ssd]"
    ),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]


@app.command(context_settings=_PASS_ON)
def serve(
    context: typer.Context,
    host: Host = None,
    port: Port = None,
    engines: Annotated[
        int | None, typer.Option(min=1, help="How many engines to start.  [default: 2]")
    ] = None,
    model: Model = None,
    chat_template: ChatTemplate = None,
    kv_cache_gib: KvCacheGib = None,
    max_model_len: MaxModelLen = None,
    tool_call_parser: ToolCallParser = None,
    tiers: Tiers = None,
    log_level: LogLevel = None,
) -> None:
    """Start engines and a gateway in front of them; Ctrl-C ends all of it.

    A cache server beside the engines keeps their KV blocks; `--tiers ""` does without. What follows
    `--` goes to vLLM.

    \b
    Examples:
      radixgate serve
      radixgate serve --port 9000 --engines 1 --model ./models/Qwen3-0.6B
      radixgate serve --tool-call-parser hermes -- --max-num-seqs 64
    """  # noqa: D301 - click keeps the lines of a paragraph that starts with this character
    from radixgate.serve import planned_serve
    from radixgate.serve import serve as run_serve

    settings = load_settings(
        host=host,
        port=port,
        engines=engines,
        model=model,
        chat_template=chat_template,
        engine_kv_cache_bytes=_bytes("--kv-cache-gib", kv_cache_gib),
        engine_max_model_len=max_model_len,
        engine_tool_call_parser=tool_call_parser,
        tiers=tiers,
        log_level=log_level,
    )
    configure_logging(settings)
    with planned_serve(settings, Workspace.current(), context.args) as plan:
        # After the plan: what is wrong with it should not have to wait for these imports.
        from gateway.server import run_gateway

        _run_async(run_serve(plan, run_gateway))


@app.command()
def gateway(
    worker: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a vLLM server; once for each. What cannot be discovered may follow: "
            "URL,model=NAME,max-model-len=N,events=ENDPOINT,replay=ENDPOINT,cache=URL"
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Folder with tokenizer files.  [default: where the workers' model is]"),
    ] = None,
    chat_template: ChatTemplate = None,
    log_level: LogLevel = None,
) -> None:
    """Serve in front of vLLM servers that already run.

    \b
    Examples:
      radixgate gateway --worker http://10.0.0.1:8000 --worker http://10.0.0.2:8000
      radixgate gateway --host 0.0.0.0 --port 8080 --worker http://127.0.0.1:8000 \\
        --tokenizer ./models/Qwen3-0.6B
    """  # noqa: D301 - click keeps the lines of a paragraph that starts with this character
    from gateway.server import run_gateway

    settings = load_settings(
        host=host,
        port=port,
        tokenizer=tokenizer,
        chat_template=chat_template,
        log_level=log_level,
    )
    configure_logging(settings)
    _run_async(run_gateway(settings, worker or [], ready=lambda: _say_listening(settings)))


@app.command(context_settings=_PASS_ON)
def worker(
    context: typer.Context,
    host: Host = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    model: Model = None,
    kv_events_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65534,
            help="TCP port for KV events, the next one for their replay, on all interfaces: "
            "for a gateway on another machine. Events show prompts' token ids.  "
            "[default: Unix sockets]",
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    kv_cache_gib: KvCacheGib = None,
    max_model_len: MaxModelLen = None,
    tool_call_parser: ToolCallParser = None,
) -> None:
    """Run one vLLM engine that a gateway can follow; it uses the cores it may run on.

    What follows `--` goes to vLLM.

    \b
    Examples:
      radixgate worker --port 8000 --model ./models/Qwen3-0.6B
      taskset -c 0-7 radixgate worker --port 8000
      radixgate worker --host 0.0.0.0 --kv-events-port 5557 -- --max-num-seqs 64
    """  # noqa: D301 - click keeps the lines of a paragraph that starts with this character
    from radixgate.worker import run_worker

    settings = load_settings(
        host=host,
        model=model,
        chat_template=chat_template,
        engine_kv_cache_bytes=_bytes("--kv-cache-gib", kv_cache_gib),
        engine_max_model_len=max_model_len,
        engine_tool_call_parser=tool_call_parser,
    )
    configure_logging(settings)
    _run_async(
        run_worker(
            settings,
            Workspace.current(),
            port=port,
            events_port=kv_events_port,
            vllm_arguments=context.args,
        )
    )


@app.command()
def cache_server(
    cache_socket: Annotated[
        Path | None,
        typer.Option(help="Unix socket to listen on.  [default: .radixgate/sockets/cache.sock]"),
    ] = None,
    tiers: Tiers = None,
    arena_gib: Annotated[
        float | None,
        typer.Option(min=0.001, help="GiB of shared memory, taken as it fills.  [default: 4]"),
    ] = None,
    log_level: LogLevel = None,
) -> None:
    """Keep the KV blocks of this node's engines, in memory and in the tiers below it.

    \b
    Examples:
      radixgate cache-server
      radixgate cache-server --tiers ram --arena-gib 32
    """  # noqa: D301 - click keeps the lines of a paragraph that starts with this character
    from engine_workers.cache_server.run import run_cache_server
    from engine_workers.cache_server.server_socket import cache_socket as socket_of

    settings = load_settings(
        cache_socket=cache_socket,
        tiers=tiers,
        arena_bytes=_bytes("--arena-gib", arena_gib),
        log_level=log_level,
    )
    configure_logging(settings)
    workspace = Workspace.current()
    path = socket_of(settings, workspace)
    _run_async(
        run_cache_server(
            settings, workspace, ready=lambda: print(f"listening on {path}", flush=True)
        )
    )


@app.command()
def version() -> None:
    """Print the version."""
    print(f"radixgate {__version__}")


def run_command() -> None:
    """Run the command that the arguments name, and exit with its status.

    Raises:
        RadixgateError: Alone or in a group; a wrong flag too is a `ConfigurationError`.
    """
    try:
        status = app(sys.argv[1:] or ["--help"], prog_name="radixgate", standalone_mode=False)
    except Exception as error:
        # The parser's own errors; their class has another home in each version of typer.
        if not hasattr(error, "format_message"):
            raise
        raise _usage_error(error) from error
    sys.exit(status)


def _usage_error(error: Exception) -> ConfigurationError:
    """One line for a wrong flag or command, as for a wrong variable."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if parameter is not None:
        name = parameter.opts[0]
    else:
        command = context.command_path.removeprefix("radixgate").strip() if context else ""
        name = getattr(error, "option_name", command) or "command"
    return ConfigurationError(name, f"{str(error).rstrip('.')}; see `radixgate --help`")


def _run_async(work: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def _say_listening(settings: Settings) -> None:
    print(f"listening on http://{settings.host}:{settings.port}", flush=True)


def _bytes(flag: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not math.isfinite(gib):  # infinity is above every minimum
        raise ConfigurationError(flag, f"{gib} is not a number of GiB; give 2, say")
    return round(gib * _GIB)
