"""All settings of the service: environment variables with the prefix ACCLIMATE_."""

import math
import os
import socket
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AliasChoices, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from pydantic_settings import SettingsError as UnparsableSetting

from acclimate_store.runtimes import Choice

PREFIX: Final = "ACCLIMATE_"


HostName: TypeAlias = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:]+)$")]
Origin: TypeAlias = Annotated[str, Field(pattern=r"^(\*|https?://[a-z0-9._-]+(:\d+)?|https?://\[[0-9a-f:]+\](:\d+)?)$")]


class SettingsError(Exception):
    """A setting is wrong; the message names its variable and what it accepts."""


class Settings(BaseSettings):
    """One field per variable: `ACCLIMATE_REDIS_URL` and so on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    redis_url: str | None = None
    """`redis://` or `unix://` URL; without one the service runs a private Redis of its own in `data_dir`."""

    redis_override: bool = False
    """Start although the Redis is not configured as the state needs it (no AOF, evicting, a replica)."""

    replicas_to_wait: int = Field(0, ge=0, le=16)
    """Copies of Redis whose confirmation every write waits for, at most 50 ms; it narrows what a fail-over can lose."""

    appendfsync: Literal["everysec", "always"] = "everysec"
    """Of the private Redis: whether each write is on the disk before the reply, or within about a second."""

    redis_max_bytes: int | None = Field(None, ge=8 * 2**20)
    """Memory of the private Redis, above which writes are refused as `store_full`; by default half of what the machine
    or container has."""

    data_dir: Path = Path(".data")
    """Where the private Redis keeps its files."""

    model_store: Path = Path("model_store/bundles")
    """Directory of the bundles, `<name>/<version>/`."""

    model: str | None = None
    """Bundle to serve: `name` for its newest version, or `name/version`; by default the only one of the store."""

    models: Annotated[tuple[str, ...], NoDecode] = ()
    """Bundles to serve, as a comma list. The first is the default model, unless `model` names it; all are reached by
    `/models/<name>/clients/...`. Each has its clients, of whom there may be `max_clients`, for itself."""

    adapter: str | None = None
    """Adapter of every client; by default the one that the bundle has shown to help, else `consensus` where the model
    can serve it, else `none`."""

    adapter_options: dict[str, Any] = Field(default_factory=dict)
    """Hyper-parameters of the adapter, as a JSON object."""

    adapters: tuple[str, ...] | None = None
    """Adapters that clients may have, as a JSON list, of a chain each part; by default all."""

    allowed_imports: tuple[str, ...] = ()
    """Architectures `module:callable` that bundles may use beside the registered ones, as a JSON list."""

    tenant: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._~-]{0,63}$")
    """Name under which all clients of this deployment are kept."""

    secret: str = ""
    """Key of the fingerprints that request bodies leave in Redis; the same on all replicas."""

    replica: str = Field(default_factory=socket.gethostname, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """Name of this replica, shown as the owner of the clients whose journals it writes; by default the host's."""

    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Torch device: `cpu`, `cuda` or `cuda:<n>`."""

    threads: int | None = Field(None, ge=1)
    """Threads of one torch operation; by default the cores that the container may use, if torch would take more."""

    runtime: Choice = "auto"
    """What computes passes without gradient: `torch`; `onnx`, ONNX Runtime, for which the bundle must carry graphs; or
    `auto`, that one where it can."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    webhook_url: str | None = Field(None, pattern=r"^https?://[!-~]+$")
    """Where it is told, by a POST signed with `secret`, that labels turned a client to the frozen model."""

    root_path: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """Path below which a proxy shows the service, such as `/acclimate`, whether or not the proxy takes it off: the
    description of the interface then says so, and both ways are answered."""

    log_format: Literal["text", "json"] = "text"
    """How the log is written to standard error: lines for people, or one JSON object each."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level that is written; from `info` on there is a line for every request, else for failures alone."""

    keys_file: Path | None = None
    """File of the API keys, one a line, made by `acclimate keys create`; it is read again when it changes. Without one,
    anybody who reaches the service may do everything."""

    allow_anonymous: bool = False
    """Listen on other addresses than loopback ones without a `keys_file`: nobody reaches them who should not."""

    tenant_rows_per_minute: int | None = Field(None, ge=1)
    """Images that each tenant may send in a minute, to all replicas together; more get 429. What was sent comes back
    evenly, and a batch above the number is taken where nothing of it is used. By default, any number."""

    tenant_bytes: int | None = Field(None, ge=1)
    """Bytes of Redis's memory that the clients of each tenant may take, of each model; further ones get 507, and so do
    those that would grow. By default, any number."""

    max_body_bytes: int = Field(32 * 2**20, ge=1)
    """Largest request body."""

    max_state_bytes: int = Field(256 * 2**20, ge=1)
    """Largest state that may be imported."""

    import_: bool = Field(True, validation_alias=AliasChoices("import_", "ACCLIMATE_IMPORT"))
    """Whether clients may be given states from outside; what a state has learned cannot be seen in its bytes."""

    max_images: int = Field(256, ge=1)
    """Most images in one batch."""

    max_pixels: int = Field(4096 * 4096, ge=1)
    """Most pixels of one encoded image."""

    max_clients: int = Field(100_000, ge=1)
    """Most clients at a time, of all replicas that share the Redis and the tenant; no further one begins."""

    max_waiting: int = Field(256, ge=1)
    """Most batches that may be under way, from the reading of their body to their answer; further ones get 429. A
    client may have no more of them than it leaves free, but up to 8 in any case."""

    max_waiting_rows: int = Field(8192, ge=1)
    """Most images in batches under way, once their bodies are read; a batch that meets no other's is always taken."""

    max_held_bytes: int = Field(2**30, ge=1)
    """Most bytes of bodies, of the images decoded from them and of exported states, of all requests together; further
    requests get 429. A client may have no more of them than it leaves free; what meets nothing else is always taken."""

    allowed_hosts: tuple[HostName, ...] = ()
    """Names under which the service answers, as a JSON list, such as `["acclimate.example", "*.internal"]`; by default
    those of the machine itself where it listens on a loopback address, and any where it does not."""

    cors_origins: tuple[Origin, ...] = ()
    """Origins whose web pages may use the service, as a JSON list, such as `["https://app.example"]`; `["*"]`: all."""

    max_step_ms: int = Field(10_000, ge=1)
    """Longest time that a step may take, as it is estimated from its adapter, hyper-parameters and number of images by
    what passes of the network took at the start; what would take longer is refused."""

    max_queue_ms: int = Field(2_000, ge=1)
    """Longest time that a batch is expected to wait for the device, by what steps have taken so far; what would wait
    longer gets 429. Callers, by their address, have equal shares of the device, and so have the clients of each."""

    request_timeout_ms: int = Field(30_000, ge=1, le=600_000)
    """Deadline of a request that names none of its own, and the longest one it may name."""

    cache_bytes: int = Field(256 * 2**20, ge=0)
    """Memory for the states of recent clients, of which those of candidates get a quarter where there are any."""

    device_cache_bytes: int = Field(2**30, ge=0)
    """How much of it may be memory of a CUDA device; states beyond wait in the host's memory for their next batch."""

    inline_max: int = Field(128 * 2**10, ge=1)
    """Largest state in bytes that every batch writes whole; of larger ones, the batches are written."""

    state_budget: float | None = Field(None, gt=0, le=1)
    """Share of its exact bytes that a stored state may take, where the adapter tolerates rounding (`atp`); 1 rounds
    nothing. None takes what `acclimate learn` found for the bundle, and else 1/8. docs/reference-state.md says what it
    costs."""

    influence: float = Field(0.0, ge=0, le=1e6)
    """Bound of what one batch may do to a client's state, against the client's own batches before: 1 lets it count for
    as much as a mean one. Pictures of noise, whose pixels have nothing to do with their neighbours, then count for
    nothing. 0 bounds nothing and lets noise count."""

    keep_snapshots: int = Field(3, ge=0, le=8)
    """Earlier states of each client that are kept to go back to, at least ten minutes apart, the older the wider; each
    takes as much of Redis as the client's state itself. 0 keeps none."""

    journal: bool = True
    """Keep the batches of large states in Redis until a snapshot covers them; without, each writes the whole state."""

    timeline: bool = True
    """Keep what became of each client, the older the coarser, to be seen at `/ui`."""

    keep_images_bytes: int = Field(0, ge=0, le=64 * 2**20)
    """Bytes for the newest images of each client, those first whose labels are asked for, to be looked at and labelled
    at `/ui`: in the memory of the replica alone, within `cache_bytes`, and gone with the client. 0 keeps none."""

    strict_replay: bool = False
    """Refuse to compute again what another device or version of torch computed, instead of counting it. The memory
    layout of passes, which each replica else chooses by trying, is then the same on all."""

    store_outage: Literal["fail", "frozen"] = "fail"
    """What becomes of batches while Redis is away: `fail` refuses them, `frozen` answers by the global model."""

    guard: Literal["adapt", "frozen", "follow-fleet", "off"] = "follow-fleet"
    """What clients get whose own labels give no verdict: `adapt`, `frozen`, or what the labels of all clients
    speak for, `follow-fleet`. With `off`, frozen and adapted predictions are not compared."""

    guard_alpha: float = Field(0.05, gt=0, lt=1)
    """Chance that the guard ever calls adaptation harmful where it is not, and helpful where it is not."""

    guard_clients: int = Field(5, ge=1)
    """Clients whose labels have to agree before anything follows from them for the others; each counts with 32 rows at
    most."""

    ask_budget: float = Field(0.01, ge=0, le=1)
    """Share of a client's rows for which replies ask for labels: of those in which the answers in play differ. What is
    not spent is kept, up to what the rows bring that are remembered. 0 asks for none."""

    candidates: tuple[str, ...] = Field((), max_length=3)
    """Adapters that are tried out beside the clients' own, as a JSON list of names; they answer nobody."""

    candidate_share: float = Field(0.1, gt=0, le=1)
    """Share of the batches that the candidates see."""

    drain_lead_s: float | None = Field(None, ge=0, le=600)
    """Seconds from SIGTERM to the last new request, for balancers to learn of it; 5 with a shared Redis, else 0."""

    drain_budget_s: float = Field(20.0, ge=0, le=600)
    """Longest time for snapshots at the end; those that are left out cost the next replica time, and lose nothing."""

    round_interval_s: float | None = Field(None, ge=1)
    """Seconds between two federated rounds of clients with `fed_ade`, `layers="all"`; by default none are run."""

    round_clients: int = Field(64, ge=1, le=1024)
    """Most clients that take part in a round."""

    state_ttl_s: int = Field(7 * 86_400, ge=60)
    """Seconds after its last batch when a client's state expires."""

    @field_validator("models", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value

    @property
    def lead_s(self) -> float:
        """Seconds of draining: a replica that has its Redis to itself has no others to hand over to."""
        return (5.0 if self.redis_url else 0.0) if self.drain_lead_s is None else self.drain_lead_s

    @property
    def grace_s(self) -> int:
        """Longest wait at the end for requests under way: no caller waits longer."""
        return math.ceil(self.request_timeout_ms / 1000)


def read_settings(**overrides: Any) -> Settings:
    """Settings from the environment.

    Raises:
        SettingsError: one line per wrong variable. One that does not exist is wrong too: a misspelt setting would
            otherwise silently keep its default.
    """
    strangers = [_stranger(name) for name in sorted(os.environ) if name.startswith(PREFIX) and not _is_setting(name)]
    if strangers:
        raise SettingsError("\n".join(strangers))
    try:
        return Settings(**overrides)
    except ValidationError as error:
        lines = [f"{variable(str(e['loc'][0]))}: {e['msg']}, not {e['input']!r}" for e in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    except UnparsableSetting as error:
        field = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "")
        raise SettingsError(f"{variable(field)}: the value must be JSON: {error.__cause__}") from None


def variable(field: str) -> str:
    """Name of the environment variable of a field; one that is a keyword of Python ends in an underscore."""
    return PREFIX + field.removeprefix(PREFIX).strip("_").upper()


def _is_setting(name: str) -> bool:
    return name in map(variable, Settings.model_fields)


def _stranger(name: str) -> str:
    known = list(map(variable, Settings.model_fields))
    near = get_close_matches(name, known, n=1)
    return f"{name}: there is no such setting; " + (f"did you mean {near[0]}?" if near else ", ".join(known))
