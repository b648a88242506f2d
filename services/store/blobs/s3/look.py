"""Whether a bucket can be worked on, asked now and then."""

import time
from collections.abc import Callable
from typing import Final

import obstore
from obstore.exceptions import BaseError

from services.kit.wire.errors import UnavailableError
from services.store.blobs.s3.client import open_to_look
from services.store.blobs.s3.faults import RETRY_SECONDS, reason

_WELL_SECONDS: Final = 5.0
"""Between two looks while all is well; each is a request that somebody counts."""
_CHANCE: Final = 2
"""So many looks in vain in a row, where the last one was not, are no chance."""


class BucketLook:
    """Lists one object: that takes the endpoint, the region, the bucket and keys."""

    def __init__(
        self, bucket: str, prefix: str, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Look at what lies below a prefix of a bucket.

        Raises:
            SettingsError: an `AWS_` variable does not fit.
        """
        self._bucket = bucket
        self._store = open_to_look(bucket, prefix)
        self._monotonic = monotonic
        self._well_until = 0.0
        self._failures = _CHANCE

    async def look(self) -> None:
        """Return where the bucket answered lately.

        Raises:
            UnavailableError: it does not; the message says why and what to do, to the operator.
        """
        now = self._monotonic()
        if now < self._well_until:
            return
        try:
            await anext(aiter(obstore.list(self._store, chunk_size=1)), None)
        except (BaseError, OSError) as error:
            self._failures += 1
            if self._failures >= _CHANCE:
                raise UnavailableError(
                    reason(error, self._bucket), retry_after_seconds=RETRY_SECONDS
                ) from error
        else:
            self._failures = 0
            self._well_until = now + _WELL_SECONDS
