"""Blobs in a bucket, read in the calling thread: what a check and a backup do."""

from collections.abc import Iterator

import obstore
from obstore.exceptions import BaseError

from services.store.blobs.base import BlobMissingError
from services.store.blobs.s3.client import open_bucket
from services.store.blobs.s3.faults import status_of, told


class S3Reader:
    """See `BlobReader`."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Look at what lies below a prefix of a bucket."""
        self._bucket = bucket
        self._store = open_bucket(bucket, prefix)

    def size(self, name: str) -> int | None:
        """See `BlobReader.size`."""
        try:
            with told(name, bucket=self._bucket):
                return obstore.head(self._store, name)["size"]
        except BlobMissingError:
            # That answer has no text, which alone tells a missing bucket from a missing blob.
            with told(name, bucket=self._bucket):
                next(iter(obstore.list(self._store, chunk_size=1)), None)
            return None

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `BlobReader.read`."""
        if length <= 0:
            return b""
        with told(name, bucket=self._bucket):
            try:
                return obstore.get_range(self._store, name, start=offset, length=length).to_bytes()
            except BaseError as error:
                if status_of(error) == 416:
                    return b""
                raise

    def names(self) -> Iterator[tuple[str, int]]:
        """See `BlobReader.names`."""
        listing = iter(obstore.list(self._store))
        while True:
            with told("a list", bucket=self._bucket):
                page = next(listing, None)
            if page is None:
                return
            yield from ((each["path"], each["size"]) for each in page)

    def unfinished(self) -> int:
        """See `BlobReader.unfinished`; what the bucket hides until it is whole is not seen."""
        return 0
