"""Settings of an executor: NIGHTSHIFT_EXECUTOR_… and what all services share."""

import re
import shlex
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.kit.process.settings import BusSettings, Listen, MaybeListen, Stores
from services.kit.wire.ids import PoolId, pool_id_of


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "executor"


class ExecutorSettings(BusSettings):
    """What an executor is told; each has a default that works on one machine."""

    model_config = SettingsConfigDict(
        env_prefix="NIGHTSHIFT_EXECUTOR_", frozen=True, extra="forbid", populate_by_name=True
    )

    secret_file: Path = Field(
        Path("nightshift-data/secret"), validation_alias="NIGHTSHIFT_SECRET_FILE"
    )
    store: Stores = "127.0.0.1:7401"
    """The store, `host:port`, or several that share a database, separated by commas."""
    name: str = Field(default_factory=_host_name, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Unique in the fleet. The host's name, which each container has one of its own of."""
    engine: Literal["simulated", "vllm"] = "simulated"
    models: str = "simulated"
    """`NAME=PATH,…`, or names only for an engine without files; the first names the pool.

    vLLM loads the first's; names with the same path are other names for it.
    """
    pool: str = ""
    """Name of the pool; empty for the first model's."""
    engine_args: str = ""
    """Goes to the engine unread, split as a shell would."""
    default_max_tokens: int | None = Field(None, gt=0)
    """Tokens generated for a line that does not say how many; None leaves it to the engine."""
    listen: Listen = "127.0.0.1:0"
    """Where health is asked for; port 0 picks a free one."""
    metrics_listen: MaybeListen = ""
    """Where metrics are served; empty for nowhere."""
    line_timeout_seconds: float = Field(3_600.0, gt=0)
    """Time in the engine after which a line is given up."""
    stall_seconds: float | None = Field(None, gt=0)
    """Time without a step of the engine, with work waiting, after which it counts as dead; three
    times its longest step where that is more. None: 60 s, or 600 s on a CPU."""
    drain_seconds: float = Field(25.0, ge=0)
    """Time that running lines get when the executor is told to stop."""
    started_dir: Path | None = None
    """Where the simulated engine notes each line that it starts; None for nowhere."""

    @field_validator("engine_args")
    @classmethod
    def _splits(cls, value: str) -> str:
        shlex.split(value)
        return value

    @model_validator(mode="after")
    def _names_models(self) -> "ExecutorSettings":
        if not self.model_paths:
            raise ValueError("NIGHTSHIFT_EXECUTOR_MODELS names none")
        if not all(self.model_paths):
            raise ValueError("NIGHTSHIFT_EXECUTOR_MODELS has an entry without a name")
        if self.engine == "vllm" and not all(self.model_paths.values()):
            raise ValueError("NIGHTSHIFT_EXECUTOR_MODELS must be NAME=PATH for the engine vllm")
        return self

    @property
    def model_paths(self) -> dict[str, str]:
        """Names of the models, in order, with where each one is; empty where none is needed."""
        pairs = (part.partition("=") for part in self.models.split(",") if part.strip())
        return {name.strip(): path.strip() for name, _, path in pairs}

    @property
    def pool_id(self) -> PoolId:
        """Id of the pool that it serves."""
        return pool_id_of(self.pool or next(iter(self.model_paths)))

    @property
    def engine_arguments(self) -> list[str]:
        """The engine's arguments, split."""
        return shlex.split(self.engine_args)
