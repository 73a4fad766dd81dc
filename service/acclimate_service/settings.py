"""All settings of the service: environment variables with the prefix ACCLIMATE_."""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict


class SettingsError(Exception):
    """A setting is wrong; the message names its variable and what it accepts."""


class Settings(BaseSettings):
    """One field per variable: `ACCLIMATE_REDIS_URL` and so on."""

    model_config = SettingsConfigDict(env_prefix="ACCLIMATE_", extra="forbid", frozen=True)

    redis_url: str | None = None
    """`redis://` or `unix://` URL; without one the service runs a private Redis of its own in `data_dir`."""

    redis_override: bool = False
    """Start although the Redis is not configured as the state needs it (no AOF, evicting, a replica)."""

    data_dir: Path = Path(".data")
    """Where the private Redis keeps its files."""

    model_store: Path = Path("model_store/bundles")
    """Directory of the bundles, `<name>/<version>/`."""

    model: str = "fashion-cnn"
    """Bundle to serve: `name` for its newest version, or `name/version`."""

    adapter: str | None = None
    """Adapter of every client; by default `atp` when the bundle carries learned rates, else `none`."""

    adapter_options: dict[str, Any] = Field(default_factory=dict)
    """Hyper-parameters of the adapter, as a JSON object."""

    allowed_imports: tuple[str, ...] = ()
    """Architectures `module:callable` that bundles may use beside the registered ones, as a JSON list."""

    tenant: str = Field("default", pattern=r"^[A-Za-z0-9._~-]{1,64}$")
    """Name under which all clients of this deployment are kept."""

    secret: str = ""
    """Key of the fingerprints that request bodies leave in Redis; the same on all replicas."""

    device: str = "cpu"
    """Torch device: `cpu`, `cuda` or `cuda:<n>`."""

    threads: int | None = Field(None, ge=1)
    """Threads of one torch operation; torch decides by default."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""

    max_body_bytes: int = Field(32 * 2**20, ge=1)
    """Largest request body."""

    max_images: int = Field(256, ge=1)
    """Most images in one batch."""

    max_pixels: int = Field(4096 * 4096, ge=1)
    """Most pixels of one encoded image."""

    max_waiting: int = Field(256, ge=1)
    """Most batches that may wait for their turn; further ones are refused with 429."""

    request_timeout_ms: int = Field(30_000, ge=1, le=600_000)
    """Deadline of a request that names none of its own, and the longest one it may name."""

    cache_bytes: int = Field(256 * 2**20, ge=0)
    """Memory for the states of recent clients."""

    inline_max: int = Field(128 * 2**10, ge=0)
    """Largest state in bytes that is written in one piece; larger ones are cut into chunks."""

    state_ttl_s: int = Field(7 * 86_400, ge=60)
    """Seconds after its last batch when a client's state expires."""


def read_settings(**overrides: Any) -> Settings:
    """Settings from the environment.

    Raises:
        SettingsError: one line per wrong variable.
    """
    try:
        return Settings(**overrides)
    except ValidationError as error:
        lines = [f"ACCLIMATE_{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors()]
        raise SettingsError("\n".join(lines)) from None
    except ValueError as error:  # a JSON value that is none
        raise SettingsError(str(error)) from None
