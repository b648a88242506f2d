"""Settings of the scheduler, from `NIGHTSHIFT_SCHEDULER_…`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import BusUrl, Listen, MaybeListen, ServiceSettings, Stores


class SchedulerSettings(ServiceSettings):
    """What may be set; each has a working default."""

    model_config = SettingsConfigDict(
        env_prefix="NIGHTSHIFT_SCHEDULER_", frozen=True, extra="forbid", populate_by_name=True
    )

    #: Health and reflection, `host:port`.
    listen: Listen = "127.0.0.1:7402"
    #: Prometheus metrics, `host:port`; empty means off.
    metrics_listen: MaybeListen = ""
    #: The store, `host:port`, or several that share a database, separated by commas.
    store: Stores = "127.0.0.1:7401"
    #: Unique in the fleet; empty means a new one at each start, which then waits for the lease of
    #: the one before it.
    name: str = Field("", max_length=128)
    #: How often the window slides without an event.
    window_tick_seconds: float = Field(60.0, gt=0)
    nats_url: BusUrl = Field("nats://127.0.0.1:4222", validation_alias="NIGHTSHIFT_NATS_URL")
    #: Servers that keep each stream: 1, or 3 with a cluster of three; the same in every service.
    nats_replicas: int = Field(1, ge=1, le=5, validation_alias="NIGHTSHIFT_NATS_REPLICAS")
    secret_file: Path = Field(
        Path("nightshift-data/secret"), validation_alias="NIGHTSHIFT_SECRET_FILE"
    )
