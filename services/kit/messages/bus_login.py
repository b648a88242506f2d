"""How a service shows the broker who it is."""

from pathlib import Path
from typing import Final

from services.kit.process.log import get_logger
from services.kit.process.service import read_secret
from services.kit.process.settings import BusSettings, SettingsError

_log = get_logger(__name__)

_FILE_SETTING: Final = "NIGHTSHIFT_NATS_PASSWORD_FILE"


class Login:
    """A user of the broker, and the file with its password."""

    def __init__(self, user: str, file: Path) -> None:
        """Read the file.

        Raises:
            SettingsError: it is missing or empty.
        """
        self.user = user
        self._file = file
        self._password = self._read()

    def _read(self) -> str:
        return read_secret(self._file, f"{self.user}'s password for NATS", _FILE_SETTING)

    def password(self) -> str:
        """Return the password that stands in the file now: it may change while we run."""
        try:
            self._password = self._read()
        except SettingsError as error:
            _log.warning("nats_password_not_read", error=str(error))
        return self._password


def login_of(settings: BusSettings, role: str) -> Login | None:
    """Return what a service of that role logs in with; None where it has no password file.

    Raises:
        SettingsError: the file is missing or empty.
    """
    if settings.nats_password_file is None:
        return None
    return Login(settings.nats_user or role, settings.nats_password_file)
