"""Clients of a bucket: endpoint, region and keys come from `AWS_` variables."""

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from obstore.exceptions import BaseError
from obstore.store import S3Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

from services.kit.process.settings import SettingsError
from services.store.blobs.s3.faults import check_endpoint

_CLIENT: Final["ClientConfig"] = {
    # An endpoint without TLS is used where one is named, and nowhere else.
    "allow_http": True,
    # A part in this time needs 256 KiB/s; a hung server is told from a slow one.
    "timeout": "20s",
    "connect_timeout": "3s",
    "pool_idle_timeout": "30s",
}
_RETRIES: Final["RetryConfig"] = {
    "max_retries": 5,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
_LOOK_CLIENT: Final["ClientConfig"] = {
    **_CLIENT,
    # Together less than a look at readiness may take, so that it says why.
    "timeout": "2s",
    "connect_timeout": "1500ms",
}
_LOOK_RETRIES: Final["RetryConfig"] = {**_RETRIES, "max_retries": 0}


def open_bucket(bucket: str, prefix: str) -> S3Store:
    """Return a client of what lies below a prefix; nothing is asked of it yet.

    Raises:
        SettingsError: an `AWS_` variable does not fit.
    """
    return _open(bucket, prefix, _CLIENT, _RETRIES)


def open_to_look(bucket: str, prefix: str) -> S3Store:
    """Return a client that gives up within two seconds, and tries nothing twice; as above."""
    return _open(bucket, prefix, _LOOK_CLIENT, _LOOK_RETRIES)


def _open(bucket: str, prefix: str, client: "ClientConfig", retries: "RetryConfig") -> S3Store:
    check_endpoint()
    try:
        return S3Store(bucket, prefix=prefix or None, client_options=client, retry_config=retries)
    except BaseError as error:
        # Its first line names what is missing or cannot be read, such as "Missing SecretAccessKey".
        line = str(error).partition("\n")[0]
        raise SettingsError(
            f"the bucket of NIGHTSHIFT_STORE_BLOBS_URL cannot be opened: {line}; its region, "
            "endpoint and keys come from AWS_ variables"
        ) from None
