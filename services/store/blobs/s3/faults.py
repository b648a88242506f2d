"""What a bucket's refusals mean: to clients, to the log, and to who runs the store."""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from obstore.exceptions import BaseError

from services.kit.process.log import get_logger
from services.kit.process.settings import SettingsError
from services.kit.wire.errors import UnavailableError
from services.store.blobs.base import BlobMissingError

_log = get_logger(__name__)

RETRY_SECONDS: Final = 2
_SHOWN_CHARACTERS: Final = 300
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_NO_BUCKET: Final = "NoSuchBucket"
_REGION_CODES: Final = ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_NO_KEYS: Final = ("/latest/api/token", "/latest/meta-data", "Missing AccessKeyId")
"""Where keys are looked for when none are set: in what a machine of Amazon's says of itself."""


def check_endpoint() -> None:
    """Refuse an endpoint that is no URL, on which the library would panic at its first request.

    Raises:
        SettingsError: the message names the variable.
    """
    for name in _ENDPOINTS:
        value = os.environ.get(name, "")
        if value and not _is_url(value):
            raise SettingsError(f"{name} must be a URL such as https://HOST:PORT")


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        # A port that is none is noticed when it is asked for.
        return url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


@contextlib.contextmanager
def told(name: str, *, bucket: str = "") -> Iterator[None]:
    """Turn the library's errors into ours; the log has the reason.

    Args:
        name: of the blob.
        bucket: given where an operator asks, who is told the reason itself.
    """
    try:
        yield
    except (BaseError, OSError) as error:
        # A missing bucket is a fault that ends; a missing object never comes back.
        if isinstance(error, FileNotFoundError) and _NO_BUCKET not in str(error):
            raise BlobMissingError(name) from None
        _log.error("blob_failed", blob=name, error=_words(error))
        raise UnavailableError(
            reason(error, bucket)
            if bucket
            else "The store's blob storage does not answer as it should right now; try again.",
            retry_after_seconds=RETRY_SECONDS,
        ) from error


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error is about, which the library tells in words only."""
    _, found, rest = str(error).partition("status code: ")
    return int(rest[:3]) if found and rest[:3].isdigit() else None


def reason(error: BaseException, bucket: str) -> str:
    """Say in a sentence why a bucket cannot be worked on, and what to do; for the operator."""
    text, code = str(error), code_of(error)
    if code == _NO_BUCKET:
        return (
            f"there is no bucket {bucket} ({code}): make it, or have NIGHTSHIFT_STORE_BLOBS_URL "
            "name another one"
        )
    if any(each in text for each in _NO_KEYS):
        return (
            f"there are no keys for the bucket {bucket}: set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or give this machine a role"
        )
    if code in _REGION_CODES or "LOCATION" in text:
        return f"AWS_REGION is not the region of the bucket {bucket}"
    status = status_of(error)
    if status in {401, 403}:
        return (
            f"the bucket {bucket} refuses the store's keys ({code or status}): see whether "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are right, and may list, read and write it"
        )
    if status is not None:
        return f"the bucket {bucket} answers {' '.join(filter(None, (str(status), code)))}"
    if "HTTP error" in text:
        return (
            f"nobody answers for the bucket {bucket}: see whether its server is started, and "
            "whether AWS_ENDPOINT_URL names it (without, it is Amazon's)"
        )
    return f"the bucket {bucket} cannot be worked on: {_words(error)}"


def code_of(error: BaseException) -> str:
    """Return the code that the server gave its refusal; empty where it gave none."""
    found = _CODE.search(str(error))
    return found.group(1) if found else ""


def _words(error: BaseException) -> str:
    """Return the library's first line, without what the server said: that quotes keys' names."""
    line = str(error).partition("\n")[0].partition(": <")[0][:_SHOWN_CHARACTERS]
    code = code_of(error)
    return f"{line} ({code})" if code else line
