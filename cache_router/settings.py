"""The one settings model: built once in `main`, passed down; nothing else reads the environment."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Every knob, its unit in its name, its meaning below it; `RADIXGATE_` and upper case."""

    model_config = SettingsConfigDict(
        env_prefix="RADIXGATE_",
        env_ignore_empty=True,
        frozen=True,
        extra="ignore",
        populate_by_name=True,
    )

    # --- the front door ---
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on."""
    max_body_bytes: PositiveInt = 32 * 1024 * 1024
    """Largest request body; beyond it 413."""
    body_silence_s: PositiveFloat = 30.0
    """Seconds a client may pause within its request body; it holds a place meanwhile. Then 408."""
    max_inflight_per_worker: PositiveInt = 256
    """Requests that may be in flight for each known worker before one is refused with 503."""
    keep_alive_s: PositiveInt = 620
    """Idle seconds before a client's connection is closed; longer than load balancers wait."""
    shutdown_grace_s: NonNegativeFloat = 5.0
    """Seconds that running requests get to finish after SIGTERM or SIGINT."""
    sse_keep_alive_s: PositiveFloat = 15.0
    """Seconds of silence on a stream before a comment is sent, so that proxies keep it open."""
    route_headers: bool = False
    """Whether answers carry `x-radixgate-worker`, `-route` and `-predicted-cached-tokens`."""
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")
    """Least severe level that is logged; no level logs prompts or keys."""

    # --- workers ---
    worker_api_key: str | None = Field(default=None, repr=False)
    """Bearer token that the workers ask for, if they do."""
    worker_poll_s: PositiveFloat = 1.0
    """Seconds between two looks at a worker: is it up, which process, which models."""
    worker_probe_timeout_s: PositiveFloat = 2.0
    """Seconds that one look may take; a worker that fails two in a row gets no requests."""
    connect_timeout_s: PositiveFloat = 2.0
    """Seconds to open a connection to a worker."""
    header_timeout_s: PositiveFloat = 600.0
    """Seconds from request sent to a worker's response head."""
    chunk_timeout_s: PositiveFloat = 600.0
    """Seconds between two pieces of a worker's response body."""
    worker_keep_alive_s: PositiveFloat = 4.0
    """Idle seconds before a connection to a worker is dropped: below vLLM's own 5."""

    # --- tokenizing ---
    tokenizer: Path | str | None = None
    """Folder (or hub id in the local cache) with tokenizer files; default: the model's `root`."""
    hub_cache: Path = Field(
        default=Path("~/.cache/huggingface/hub"),
        validation_alias=AliasChoices("RADIXGATE_HUB_CACHE", "HF_HUB_CACHE"),
    )
    """Where models downloaded from a hub lie; nothing is downloaded by the gateway."""
    chat_template: Path | None = None
    """Jinja file that the engines were given with `--chat-template`, if they were."""
    tokenizer_threads: PositiveInt = 2
    """Threads that tokenize; they are the only ones that touch prompt text."""
    tokenizer_cache_bytes: PositiveInt = 64 * 1024 * 1024
    """Bytes of the incremental tokenization cache, all models together."""
    parity_sample_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of requests whose token ids are compared with the engine's own, in the background."""
    engine_tokenize_timeout_s: PositiveFloat = 2.0
    """Seconds that the engine's own tokenizing endpoint may take before a route goes without."""

    # --- the index and the route ---
    prediction_ttl_s: PositiveFloat = 5.0
    """Seconds that a predicted prefix counts after its prefill, until events confirm it."""
    index_max_blocks: PositiveInt = 1_000_000
    """Most (block, holder) entries the index keeps; the holder with the most gives way first."""
    kv_event_replay_timeout_s: PositiveFloat = 5.0
    """Seconds that an engine may take to answer a replay request before it counts as failed."""
    kv_event_probe_s: PositiveFloat = 2.0
    """Seconds of silence after which an engine is asked for a last event that may be lost."""

    # --- engines that `serve` and `worker` start ---
    engines: int = Field(default=2, ge=1, le=64)
    """How many engines `serve` starts."""
    model: str | None = None
    """Model folder or hub id to serve; default: SmolLM2-135M-Instruct, made by `make serve`."""
    engine_python: Path | None = None
    """A Python that has vLLM, to run the engines with; default: what `make serve` set up."""
    engine_kv_cache_bytes: PositiveInt = 2 * 1024**3
    """Bytes of KV cache of a CPU engine; a GPU engine takes what its GPU has."""
    engine_max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; default: the model's, or less if the KV cache holds less."""
    engine_tool_call_parser: str | None = None
    """vLLM's name for the model's tool-call format, `hermes` for example; default: no tool calls
    unless a request forces one."""
    engine_log_dir: Path | None = None
    """Folder for the logs of `serve`'s engines; default: `.radixgate/logs` in the checkout."""
    engine_ready_timeout_s: PositiveFloat = 900.0
    """Seconds that an engine may take from its start until it answers."""

    # --- where blocks are stored below memory ---
    ssd_folder: Path | None = None
    """Folder of the SSD tier, of one cache server alone; default: `.radixgate/ssd`."""
    ssd_capacity_bytes: PositiveInt = 16 * 1024**3
    """Bytes that the SSD tier may occupy; what is worth least gives way."""
    ssd_threads: PositiveInt = 4
    """Reads and writes of the SSD tier at the same time."""
    ssd_fsync: bool = False
    """Whether a block has reached the device before it counts as stored. Without, a power cut costs
    the last blocks; what is half there is found out by its checksum."""
    redis_url: str | None = Field(default=None, repr=False)
    """`redis://`, `rediss://` or `unix://` URL of Redis or Valkey, with user and password."""
    redis_url_file: Path | None = None
    """File that holds this URL, so that no password is in the environment; it wins."""
    redis_cluster: bool = False
    """Whether the URL names a node of a Redis cluster."""
    redis_ttl_s: PositiveInt = 7 * 24 * 3600
    """Seconds after which a block in Redis is gone; the server's own eviction may be earlier."""
    redis_timeout_s: PositiveFloat = 2.0
    """Seconds that one block or one question may take on Redis before the tier counts as down."""
    redis_connections: PositiveInt = 4
    """Connections to Redis (to each node of a cluster)."""
    s3_bucket: str | None = None
    """Bucket of the S3 tier."""
    s3_prefix: str = "radixgate"
    """What all of the S3 tier's keys begin with."""
    s3_endpoint: str | None = None
    """URL of an S3-compatible store; default: AWS."""
    s3_region: str = "us-east-1"
    """Region of the bucket."""
    s3_access_key_id: str | None = Field(default=None, repr=False)
    """Access key; default: AWS's own variables, then what the machine's role gives."""
    s3_secret_access_key: str | None = Field(default=None, repr=False)
    """Its secret."""
    s3_credentials_file: Path | None = None
    """File in AWS's format whose profile `default` has the key and its secret; it wins."""
    s3_timeout_s: PositiveFloat = 10.0
    """Seconds that one block or one question may take on S3 before the tier counts as down."""
    s3_concurrency: PositiveInt = 16
    """Requests to S3 at the same time."""
    tier_key_file: Path | None = None
    """File with a secret that all nodes have; blocks on shared tiers are authenticated with it."""
    tier_encrypt: bool = False
    """Whether blocks on shared tiers are also encrypted, with the token ids in their headers."""

    # --- the cache server and its tiers ---
    tiers: str = "ram,ssd"
    """Where KV blocks are kept, the fastest first: `ram`, then any of `ssd`, `redis`, `s3`."""
    cache_socket: Path | None = None
    """Unix socket of the node's cache server; default: `.radixgate/sockets/cache.sock`."""
    arena_bytes: PositiveInt = 4 * 1024**3
    """Bytes of shared memory for blocks; taken from the system only as they fill."""
    tenant_quota_share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Part of the arena that one tenant's blocks may hold: those of one model and cache salt."""
    ssd_write_bytes_per_s: PositiveInt = 512 * 1024**2
    """Bytes a second that may be written to the SSD on average; what is worth least is left out."""
    shared_write_bytes_per_s: PositiveInt = 256 * 1024**2
    """The same for each of Redis and S3."""
    write_ring_bytes: PositiveInt = 128 * 1024**2
    """Bytes of shared memory through which one engine's worker hands over blocks, at most."""
    lookup_deadline_s: PositiveFloat = 0.03
    """Seconds that the tiers get to say what they hold; what comes later is not waited for."""
    stage_deadline_s: PositiveFloat = 2.0
    """Seconds that blocks get to come from the tiers; then a request gets what is there."""
    lease_ttl_s: PositiveFloat = 600.0
    """Seconds after which an engine that has not returned a lease is taken to have failed."""
    cache_server_metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the cache server's `/metrics` and of what gateways ask it, on the address of
    RADIXGATE_HOST; default: none."""
    cache_events_tcp: bool = False
    """Whether the cache server's KV events go over TCP on all interfaces, for gateways on other
    machines; they show prompts' token ids. Default: Unix sockets beside RADIXGATE_CACHE_SOCKET."""

    @property
    def hub_cache_folder(self) -> Path | None:
        """`hub_cache` with its `~` resolved, None for a user without a home."""
        try:
            return self.hub_cache.expanduser()
        except RuntimeError:
            return None
