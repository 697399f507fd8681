"""`radixgate cache`: looking into a running cache server, and telling it what to keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cache_router.errors import CacheWireError
from engine_workers.cache_server.admin_client import AdminClient
from engine_workers.cache_server.admin_wire import (
    Answer,
    BlockList,
    Changed,
    ClearBlocks,
    Failed,
    GetStats,
    ListBlocks,
    PinBlocks,
    Question,
    Stats,
    UnpinBlocks,
    Verified,
    VerifyBlocks,
)
from engine_workers.cache_server.server_socket import cache_socket as socket_of
from engine_workers.workspace import Workspace
from radixgate.cache_warming import warm_prompts
from radixgate.load_settings import load_settings

_ANSWER_S = 30.0
_READ_ALL_S = 3600.0
"""Verifying reads every block of a tier."""
_MIB = 1024 * 1024

app = typer.Typer(
    name="cache",
    help="Look into the running cache server of this node.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)

CacheSocket = Annotated[
    Path | None,
    typer.Option(help="The server's Unix socket.  [default: .radixgate/sockets/cache.sock]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of a table.")]
Hashes = Annotated[
    list[str], typer.Argument(help="Block hashes as `ls` shows them, or their first digits.")
]
Tiers = Annotated[list[str], typer.Argument(help="ram, ssd, redis, s3.")]


@app.command()
def stats(cache_socket: CacheSocket = None, json: Json = False) -> None:
    """Show how full each tier is, and who is connected."""
    _tell(_ask(cache_socket, GetStats()), json)


@app.command(name="ls")
def list_blocks(
    tier: Annotated[str, typer.Argument(help="ram, ssd, redis or s3.")] = "ram",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most blocks to list.")] = 100,
    cache_socket: CacheSocket = None,
    json: Json = False,
) -> None:
    """List blocks of a tier."""
    _tell(_ask(cache_socket, ListBlocks(tier, limit)), json)


@app.command()
def verify(tiers: Tiers, cache_socket: CacheSocket = None, json: Json = False) -> None:
    """Read every block of some tiers again, and drop what is not right."""
    _tell(_ask(cache_socket, VerifyBlocks(tiers), _READ_ALL_S), json)


@app.command()
def pin(hashes: Hashes, cache_socket: CacheSocket = None, json: Json = False) -> None:
    """Keep blocks in memory until they are unpinned or the server ends."""
    _tell(_ask(cache_socket, PinBlocks(hashes)), json)


@app.command()
def unpin(hashes: Hashes, cache_socket: CacheSocket = None, json: Json = False) -> None:
    """Let pinned blocks give way again."""
    _tell(_ask(cache_socket, UnpinBlocks(hashes)), json)


@app.command()
def clear(tiers: Tiers, cache_socket: CacheSocket = None, json: Json = False) -> None:
    """Forget all blocks of some tiers; of a shared one, those that this node put there."""
    _tell(_ask(cache_socket, ClearBlocks(tiers), _READ_ALL_S), json)


@app.command()
def warm(
    prompts: Annotated[
        Path,
        typer.Argument(help="One prompt a line: plain text, or the JSON body of a request."),
    ],
    url: Annotated[
        str, typer.Option(help="The gateway whose engines compute them.")
    ] = "http://127.0.0.1:8080",
    json: Json = False,
) -> None:
    """Have prompts computed once, so that their blocks are there when they are needed."""
    num_warmed = warm_prompts(prompts, url)
    if json:
        print(msgspec.json.encode({"num_prompts": num_warmed}).decode())
    else:
        print(f"{num_warmed} prompts")


def _ask(cache_socket: Path | None, question: Question, timeout_s: float = _ANSWER_S) -> Answer:
    settings = load_settings(cache_socket=cache_socket)
    with AdminClient(socket_of(settings, Workspace.current()), timeout_s) as client:
        answer = client.ask(question)
    if isinstance(answer, Failed):
        raise CacheWireError(answer.reason)
    return answer


def _tell(answer: Answer, as_json: bool) -> None:
    if as_json:
        fields = msgspec.to_builtins(answer)
        del fields["type"]
        print(msgspec.json.encode(fields).decode())
        return
    match answer:
        case Stats():
            _tell_stats(answer)
        case BlockList(blocks):
            rows = [
                (
                    block.block_hash[:16],
                    (block.parent_hash or "")[:16],
                    block.namespace[:8],
                    str(block.num_tokens),
                    str(block.payload_bytes),
                    block.source,
                    str(block.num_pins),
                )
                for block in blocks
            ]
            _table(("block", "parent", "namespace", "tokens", "bytes", "source", "pins"), rows)
        case Verified(num_good, num_bad):
            print(f"{num_good} good, {num_bad} dropped")
        case Changed(num_blocks):
            print(f"{num_blocks} blocks")


def _tell_stats(answer: Stats) -> None:
    rows = [
        (
            tier.tier,
            str(tier.num_blocks),
            f"{tier.used_bytes / _MIB:.1f}",
            "" if tier.capacity_bytes is None else f"{tier.capacity_bytes / _MIB:.1f}",
            f"{tier.waiting_bytes / _MIB:.1f}",
        )
        for tier in answer.tiers
    ]
    _table(("tier", "blocks", "MiB", "of MiB", "MiB waiting"), rows)
    print(
        f"up {answer.uptime_s:.0f} s, {answer.num_engines} engines, {answer.num_leases} leases, "
        f"{answer.num_quarantined_leases} in quarantine, {answer.num_pinned} pinned, "
        f"{answer.num_staging} on their way"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*titles, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(soft_wrap=True).print(table)
