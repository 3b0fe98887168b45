"""Every setting of every service: a typed field, an ``OCTAVO_*`` environment variable and a ``--flag`` of the same name.

Flags carry vLLM's names where vLLM has them. ``group`` is the heading a flag stands under in ``--help``. A flag wins over
the environment, the environment over the default.
"""

from __future__ import annotations

import re
import socket
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from octavo_shared.bounds import MAX_CHOICES, MAX_PROMPTS
from octavo_shared.errors import SettingError as SettingError

DEFAULT_SCHEDULER_ADDRESS = "127.0.0.1:50051"

_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def parse_count(value: Any) -> Any:
    """Read ``4k`` as 4,000 and ``4K`` as 4,096, as vLLM does; anything else passes through to pydantic."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)([kmgtKMGT])(?:i?B)?\s*", value)):
        return int(Decimal(match[1]) * _SUFFIXES[match[2]])
    return value


def split_list(value: Any) -> Any:
    """Read ``a,b`` as a list; lists pass through."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def split_counts(value: Any) -> Any:
    """Read ``1,2`` and ``["1,2", 4]`` as lists of numbers."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [parse_count(count) for part in parts for count in (split_list(part) if isinstance(part, str) else [part])]


def check_redis_url(value: str) -> str:
    """Refuse what is no Redis URL."""
    if not value.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("must begin with redis://, rediss:// or unix://")
    return value


def split_keys(value: Any) -> Any:
    """Read ``a,b`` and ``["a,b"]`` as two keys.

    Nothing but blanks is refused: whoever passes an empty variable believes the server protected.
    """
    keys: list[Any] = []
    for part in [value] if isinstance(value, str) else value:
        found = split_list(part)
        if not found:
            raise ValueError("a key must not be blank")
        keys += found if isinstance(found, list) else [part]
    return keys


def check_not_blank(value: str | None) -> str | None:
    """Refuse a blank name of what protects the server, for the same reason."""
    if value is not None and not value.strip():
        raise ValueError("must not be blank; without it, leave the setting out")
    return value


def check_admin_keys(value: list[str], info: ValidationInfo) -> list[str]:
    """Refuse an admin key that clients have as well."""
    if set(value) & set(info.data.get("api_key", ())):
        raise ValueError("a key must not be an API key as well: every client would be an administrator")
    return value


def check_secret(value: str | None) -> str | None:
    """Refuse what can be guessed, or cannot travel in a header."""
    if value is not None and not (
        len(value) >= 16 and value.isascii() and value.isprintable() and value.strip() == value
    ):
        raise ValueError("a secret must have at least 16 printable ASCII characters, with no blank at either end")
    return value


def refuse_remote_code(value: bool) -> bool:
    """Refuse to run code that comes with a model."""
    if value:
        raise ValueError("is refused: Octavo never runs code that comes with a model")
    return value


def parse_weights(value: Any) -> Any:
    """Read ``a=2,b=0.5`` as a mapping; mappings pass through."""
    if not isinstance(value, str):
        return value
    weights: dict[str, str] = {}
    for part in split_list(value):
        name, equals, weight = (piece.strip() for piece in part.rpartition("="))
        if not equals or not name:
            raise ValueError(f"must be like name=2,other=0.5, and {part!r} is not")
        if name in weights:
            raise ValueError(f"{name!r} has two weights")
        weights[name] = weight
    return weights


Weight = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(parse_count)]
RedisUrl = Annotated[str, AfterValidator(check_redis_url)]
NameList = Annotated[list[str], NoDecode, BeforeValidator(split_list)]
CountList = Annotated[list[Annotated[int, Field(ge=1)]], NoDecode, BeforeValidator(split_counts)]
KeyList = Annotated[list[str], NoDecode, BeforeValidator(split_keys)]
AdminKeyList = Annotated[list[str], NoDecode, BeforeValidator(split_keys), AfterValidator(check_admin_keys)]
Secret = Annotated[str | None, AfterValidator(check_secret)]
# A file that protects the server.
Guard = Annotated[str | None, AfterValidator(check_not_blank)]
# Redis counts leases in milliseconds.
Lease = Annotated[float, Field(ge=0.1, le=86400, allow_inf_nan=False)]
NoRemoteCode = Annotated[bool, AfterValidator(refuse_remote_code)]
Weights = Annotated[dict[str, Weight], NoDecode, BeforeValidator(parse_weights)]


def setting(default: Any, group: str, help: str, **constraints: Any) -> Any:
    """A field with its heading and its one-line description."""
    return Field(default, description=help, json_schema_extra={"group": group}, **constraints)


class CommonSettings(BaseSettings):
    """What every service must agree on."""

    model_config = SettingsConfigDict(env_prefix="OCTAVO_", extra="ignore", frozen=True, protected_namespaces=())

    model: str = setting(
        "", "model", "Hugging Face folder, hub id or GGUF file; a folder when a service is started alone."
    )
    served_model_name: NameList = setting(
        [], "model", "Names clients may use, comma separated; the first one is reported. Default: the folder's name."
    )
    trust_remote_code: NoRemoteCode = setting(
        False, "model", "Refused: no code that comes with a model is ever run. Known so that the refusal says why."
    )
    redis_url: RedisUrl = setting(
        "redis://127.0.0.1:6379/0",
        "log",
        "Redis or Valkey: redis://, rediss:// or unix:// URL, with user and password where needed (see docs/security.md).",
    )
    redis_appendfsync: Literal["always", "everysec"] = setting(
        "everysec",
        "log",
        "When the Redis that `octavo serve` starts has what it was told on disk: before it answers, or within a second.",
    )
    otlp_traces_endpoint: str | None = setting(None, "observability", "OTLP/gRPC endpoint that traces are sent to.")
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "observability", "Least severe log lines shown."
    )

    @property
    def model_name(self) -> str:
        """The name under which the services find each other and which clients are told."""
        return self.served_model_name[0] if self.served_model_name else Path(self.model).name


class GrpcSettings(CommonSettings):
    """The line between scheduler and executors."""

    scheduler_address: str = setting(
        DEFAULT_SCHEDULER_ADDRESS, "scheduler", "host:port or unix:path: the scheduler listens, executors dial."
    )
    executor_secret: Secret = setting(
        None, "scheduler", "Executors must know it to attach. Better in the environment than on a command line."
    )
    grpc_ssl_keyfile: Guard = setting(None, "scheduler", "PEM key of this side of the gRPC line.")
    grpc_ssl_certfile: Guard = setting(None, "scheduler", "PEM certificate (chain) of this side of the gRPC line.")
    grpc_ssl_ca_certs: Guard = setting(
        None,
        "scheduler",
        "PEM authorities that the other side's certificate must come from; a scheduler then asks for one.",
    )


class GatewaySettings(CommonSettings):
    """The HTTP API."""

    host: str = setting("127.0.0.1", "HTTP", "Address to listen on.")
    port: int = setting(8000, "HTTP", "Port to listen on; 0 picks a free one.", ge=0, le=65535)
    api_key: KeyList = setting([], "HTTP", "Keys of which a client must send one as a bearer token.")
    api_key_file: Guard = setting(
        None, "HTTP", "TOML file of API keys as tenants, made by `octavo keys`; read again when it changes."
    )
    admin_api_key: AdminKeyList = setting(
        [], "HTTP", "Keys that also open /v1/kv and /v1/cache/reset. Default: see docs/api.md."
    )
    ssl_keyfile: Guard = setting(None, "HTTP", "PEM key: with it and --ssl-certfile the API is HTTPS.")
    ssl_certfile: Guard = setting(None, "HTTP", "PEM certificate (chain) of the API.")
    ssl_ca_certs: Guard = setting(None, "HTTP", "PEM authorities that clients' certificates must come from.")
    ssl_cert_reqs: int | None = setting(
        None,
        "HTTP",
        "Whether clients need certificates: 0 no, 1 only good ones if any, 2 yes. Default: 2 with --ssl-ca-certs, else 0.",
        ge=0,
        le=2,
    )
    allowed_origins: NameList = setting(["*"], "HTTP", "Origins that browsers may call from.")
    max_request_body_bytes: Count = setting(16 << 20, "HTTP", "Larger request bodies are refused with 413.", ge=1)
    error_code_style: Literal["openai", "vllm"] = setting(
        "openai", "HTTP", "error.code: OpenAI's word, or the HTTP status as an integer as vLLM gives it."
    )
    chat_template: str | None = setting(None, "output", "Jinja chat template: a file, or the template itself.")
    response_role: str = setting("assistant", "output", "Role named in chat answers.")
    max_logprobs: int = setting(20, "output", "Most alternatives per token a client may ask for; -1 = no limit.", ge=-1)
    generation_config: Literal["auto", "vllm"] = setting(
        "auto", "output", "auto: sampling defaults from the model's generation_config.json; vllm: neutral defaults."
    )
    return_tokens_as_token_ids: bool = setting(False, "output", "Name tokens in log-probabilities as token_id:N.")
    enable_prompt_tokens_details: bool = setting(False, "output", "Report cached prompt tokens in usage.")
    enable_force_include_usage: bool = setting(False, "output", "Send usage at the end of every stream.")
    enable_request_id_headers: bool = setting(True, "HTTP", "Echo X-Request-Id.")
    seed: int | None = setting(None, "model", "Makes the seeds of requests that name none reproducible.")
    max_num_prompts: int = setting(1024, "HTTP", "Most prompts in one request.", ge=1, le=MAX_PROMPTS)
    max_num_choices: int = setting(4096, "HTTP", "Most choices in one request, of all its prompts together.", ge=1)
    max_n: int = setting(128, "HTTP", "Most choices per prompt.", ge=1, le=MAX_CHOICES)
    admin_timeout_s: float = setting(
        5.0, "HTTP", "How long /v1/kv and /v1/cache/reset wait for the scheduler.", gt=0, allow_inf_nan=False
    )
    stream_resume_ttl: float = setting(
        120.0, "HTTP", "For how long after its end a stream can be had again (seconds); 0 = not at all.", ge=0, le=86400
    )
    disconnect_grace: float = setting(
        0.0,
        "HTTP",
        "How long a request goes on after its client has left (seconds); for clients that say that they come back, as long "
        "as --stream-resume-ttl.",
        ge=0,
        le=86400,
    )
    drain_timeout_s: float = setting(
        10.0,
        "log",
        "How long a gateway told to stop waits for its streams to end, an executor to be relieved of its sequences (seconds).",
        ge=0,
        le=86400,
    )
    gateway_lease_s: Lease = setting(10.0, "log", "A gateway silent for this long counts as gone (seconds).")


class SchedulerSettings(GrpcSettings):
    """Requests, blocks and plans."""

    scheduling_policy: Literal["fcfs", "priority", "fair"] = setting(
        "fcfs", "scheduler", "Who runs first: by arrival, by the requests' priority, or the tenant that has had least."
    )
    tenant_weights: Weights = setting(
        {}, "scheduler", "Shares under the fair policy, like t-12ab=2,t-34cd=0.5; by default every tenant has 1."
    )
    enable_prefix_caching: bool = setting(True, "cache", "Share blocks between requests with a common prefix.")
    prefix_cache_scope: Literal["global", "tenant", "request"] = setting(
        "tenant", "cache", "Who shares blocks: everyone, members of a tenant (API key), or choices of a request."
    )
    max_num_seqs: Count | None = setting(None, "scheduler", "Most sequences running at once (default 256).", ge=1)
    max_num_batched_tokens: Count | None = setting(
        None, "scheduler", "Most tokens computed in one step (default: what executors can).", ge=1
    )
    enable_chunked_prefill: bool = setting(True, "scheduler", "Compute long prompts in pieces beside decodes.")
    long_prefill_token_threshold: Count = setting(
        0, "scheduler", "Most tokens of one prompt per step; 0 = no limit.", ge=0
    )
    max_num_partial_prefills: Count = setting(
        0, "scheduler", "Most prompts that are in the middle of being computed at once; 0 = no limit.", ge=0
    )
    max_queued_tokens: Count | None = setting(
        None,
        "scheduler",
        "Requests beyond so many tokens of queued work get 429; 0 = no bound (default: 16 times the KV cache, at least 256K).",
        ge=0,
    )
    max_queue_wait: float = setting(
        30.0,
        "scheduler",
        "Requests get 429 when their turn would come later than in so many seconds, or than in a third of that if the queue goes "
        "on growing after a burst; 0 = no bound, the queue may be deep.",
        ge=0,
        le=86400,
        allow_inf_nan=False,
    )
    max_ttft_ratio: float = setting(
        2.0,
        "scheduler",
        "Once more come than can be served, and until load falls, only requests get in whose first token comes within so many "
        "times what it takes when nothing else runs; 0 = no such bound.",
        ge=0,
        le=1e6,
        allow_inf_nan=False,
    )
    scheduler_lease_s: Lease = setting(5.0, "log", "A scheduler silent for this long loses its lease (seconds).")
    executor_lease_s: Lease = setting(
        10.0, "scheduler", "An executor silent for this long is let go; its requests go on elsewhere (seconds)."
    )
    step_timeout_s: float | None = setting(
        None,
        "scheduler",
        "An executor whose step takes longer is let go (seconds; default: 20 times what is expected of it, at least 30).",
        gt=0,
        allow_inf_nan=False,
    )


class ExecutorSettings(GrpcSettings):
    """Weights, pages and the forward pass."""

    scheduler_address: str = setting(
        DEFAULT_SCHEDULER_ADDRESS,
        "scheduler",
        "host:port or unix:path of the scheduler; of several, comma separated, whichever answers.",
    )
    executor_name: str = setting(
        socket.gethostname(), "scheduler", "Name of this executor, stable across restarts (default: the host's name)."
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "model", "Where to compute.")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = setting(
        "auto", "model", "Type of weights and activations; auto: on a GPU the checkpoint's own."
    )
    quantization: Literal["fp8", "awq", "gptq", "compressed-tensors"] | None = setting(
        None, "model", "fp8: round plain weights to 8 bits as they are loaded. Others must be what the checkpoint has."
    )
    enforce_eager: bool = setting(
        False, "model", "On a GPU, launch every kernel by itself instead of graphs of decodes."
    )
    max_cudagraph_capture_size: Count | None = setting(
        None,
        "model",
        "Largest batch of decodes that a graph is captured for (default 512, at most --max-num-seqs).",
        ge=1,
    )
    cuda_graph_sizes: CountList = setting(
        [], "model", "Batches that graphs are captured for, comma separated; default: 1, 2, 4 and multiples of 8."
    )
    max_model_len: Count | None = setting(None, "model", "Longest sequence in tokens; default from the model.", ge=1)
    block_size: int | None = setting(None, "cache", "Tokens per KV-cache block (default 16).", ge=1, le=256)
    gpu_memory_utilization: float = setting(0.9, "cache", "Share of GPU memory the executor may use.", gt=0, le=1)
    kv_cache_memory_bytes: Count | None = setting(None, "cache", "Bytes for the KV cache; wins over utilisation.", ge=1)
    num_gpu_blocks_override: Count | None = setting(None, "cache", "Number of KV-cache blocks; wins over both.", ge=1)
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = setting(
        "auto", "cache", "Type of keys and values; auto: that of activations, or the checkpoint's. Others need a GPU."
    )
    kv_offloading_size: float = setting(
        0.0,
        "cache",
        "GiB of host memory for blocks that the KV cache has no room for; 0 = none.",
        ge=0,
        allow_inf_nan=False,
    )
    max_num_seqs: Count | None = setting(None, "scheduler", "Most sequences running at once (default 256).", ge=1)
    max_num_batched_tokens: Count | None = setting(
        None, "scheduler", "Most tokens computed in one step (default 8192 on a GPU, 2048 on a CPU).", ge=1
    )
    num_threads: int | None = setting(None, "model", "CPU threads of the forward pass (default: all cores).", ge=1)
    drain_timeout_s: float = setting(
        10.0,
        "log",
        "How long a gateway told to stop waits for its streams to end, an executor to be relieved of its sequences (seconds).",
        ge=0,
        le=86400,
    )
    outbox_capacity: int = setting(64, "log", "Steps whose tokens may wait for Redis before stepping stops.", ge=1)


S = TypeVar("S", bound=CommonSettings)


def load_settings(kind: type[S], **flags: Any) -> S:
    """Build settings from flags (those not None), environment and defaults.

    Raises:
        SettingError: a value is out of range or of the wrong type; the message names flag and variable.
    """
    try:
        return kind(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = str(problem["loc"][0]) if problem["loc"] else "?"
            lines.append(f"--{name.replace('_', '-')} (OCTAVO_{name.upper()}): {problem['msg']}")
        raise SettingError("; ".join(lines)) from error
