"""Settings of the store, from `NIGHTSHIFT_STORE_…`."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.process.service import read_secret
from services.kit.process.settings import BusSettings, Listen, MaybeListen, MaybePath
from services.store.db.urls import parse_url

MIB = 1024 * 1024


class StoreSettings(BusSettings):
    """What may be set; each has a working default."""

    model_config = SettingsConfigDict(
        env_prefix="NIGHTSHIFT_STORE_", frozen=True, extra="forbid", populate_by_name=True
    )

    listen: Listen = "127.0.0.1:7401"
    metrics_listen: MaybeListen = ""
    data_dir: Path = Path("nightshift-data")
    #: Empty means SQLite in `data_dir`.
    database_url: str = ""
    #: Holds the password that `database_url` leaves out, for PostgreSQL.
    database_password_file: MaybePath = None
    #: `s3://BUCKET/PREFIX`, endpoint and keys being in `AWS_` variables, or `file:///DIRECTORY`;
    #: empty means `blobs` in `data_dir`.
    blobs_url: str = ""
    #: None means `secret` in `data_dir`, made where it is missing.
    secret_file: Path | None = Field(None, validation_alias="NIGHTSHIFT_SECRET_FILE")
    #: With less room on its disks the store takes no new files and batches, only results.
    disk_reserve_bytes: int = Field(1024 * MIB, ge=0)
    #: Most bytes of all files of a project that has no quota of its own; 0 means no limit.
    project_quota_bytes: int = Field(0, ge=0)
    max_batch_lines: int = Field(50_000, gt=0)
    max_batch_file_bytes: int = Field(200 * MIB, gt=0)
    max_file_bytes: int = Field(512 * MIB, gt=0)
    max_upload_bytes: int = Field(8 * 1024 * MIB, gt=0)
    max_line_bytes: int = Field(16 * MIB, gt=0)
    #: Longest result line; a longer one becomes an error of its request. Executors learn it when
    #: they register. An error line always fits.
    max_result_bytes: int = Field(256 * MIB, ge=64 * 1024, le=1024 * MIB)
    max_reported_errors: int = Field(100, gt=0)
    lease_seconds: float = Field(15.0, gt=0)
    max_attempts: int = Field(3, gt=0, lt=1_000_000)
    #: Lets the lines of a batch name several models, each of which runs on its own pool.
    mixed_models: bool = False
    #: `full` syncs every commit to disk before it is acknowledged; `relaxed` may lose the last
    #: seconds to a power cut.
    durability: Literal["full", "relaxed"] = "full"
    #: Lets webhooks go to private addresses and over http, as within one's own network.
    webhooks_allow_private: bool = False

    @property
    def sqlalchemy_url(self) -> str:
        """Where the database is, with its password.

        Raises:
            SettingsError: it is no URL, or the password's file cannot be read.
        """
        url = self.database_url or f"sqlite:///{self.data_dir / 'nightshift.db'}"
        if self.database_password_file is None or not url.startswith("postgres"):
            return url
        parsed = parse_url(url)
        if parsed.password is not None:
            return url
        password = read_secret(
            self.database_password_file,
            "the database's password",
            "NIGHTSHIFT_STORE_DATABASE_PASSWORD_FILE",
        )
        return parsed.set(password=password).render_as_string(hide_password=False)
