"""Where blobs are kept, as the settings say."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from services.kit.process.settings import SettingsError
from services.store.blobs.base import Blobs
from services.store.blobs.disk_space import Disk
from services.store.blobs.local import LocalBlobs
from services.store.settings import StoreSettings


def open_blobs(settings: StoreSettings) -> Blobs:
    """Open the place that `NIGHTSHIFT_STORE_BLOBS_URL` names.

    Raises:
        SettingsError: it names none.
    """
    folder = folder_of(settings)
    if folder is not None:
        return LocalBlobs(folder, durable=settings.durability == "full")
    # Imported where it is used: its library takes memory that a store with a directory needs not.
    from services.store.blobs.s3.blobs import S3Blobs

    return S3Blobs(*bucket_of(settings))


def bucket_of(settings: StoreSettings) -> tuple[str, str]:
    """Return bucket and prefix, where blobs lie in one."""
    url = urlsplit(settings.blobs_url)
    return url.netloc, url.path.strip("/")


def disk_of(settings: StoreSettings) -> Disk:
    """Return what watches the disks that database and blobs lie on; those of others count not."""
    folders = [] if settings.database_url else [settings.data_dir]
    blobs = folder_of(settings)
    if blobs is not None:
        folders.append(blobs)
    return Disk(folders, settings.disk_reserve_bytes)


def folder_of(settings: StoreSettings) -> Path | None:
    """Return the directory that blobs lie in; None where they do not lie on a disk of ours.

    Raises:
        SettingsError: the setting names no place.
    """
    if not settings.blobs_url:
        return settings.data_dir / "blobs"
    url = urlsplit(settings.blobs_url)
    plain = not (url.query or url.fragment or "@" in url.netloc)
    if url.scheme == "s3" and url.netloc and plain and _is_prefix(url.path.strip("/")):
        return None
    if url.scheme == "file" and not url.netloc and url.path.startswith("/") and plain:
        return Path(unquote(url.path))
    raise SettingsError(
        "NIGHTSHIFT_STORE_BLOBS_URL must be s3://BUCKET/PREFIX or file:///DIRECTORY, or empty for "
        "a directory in NIGHTSHIFT_STORE_DATA_DIR; endpoint and keys of S3 come from AWS_ variables"
    )


def _is_prefix(text: str) -> bool:
    """Whether a bucket's names may begin so: in parts, none of which stands for another folder."""
    return not text or not {"", ".", ".."} & set(text.split("/"))
