"""Settings of the scheduler, from `NIGHTSHIFT_SCHEDULER_…`."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.process.settings import BusSettings, Listen, MaybeListen, Stores


class SchedulerSettings(BusSettings):
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
    secret_file: Path = Field(
        Path("nightshift-data/secret"), validation_alias="NIGHTSHIFT_SECRET_FILE"
    )
