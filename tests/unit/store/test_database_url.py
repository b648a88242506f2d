"""What is no URL of a database is refused without its text: a password may be in it."""

import pytest

from services.kit.process.settings import SettingsError
from services.store.db.urls import open_dialect
from services.store.snapshot import take_snapshot

pytestmark = pytest.mark.unit

BROKEN = (
    "host=db.example password=hidden",
    "postgresql://bob:hidden@db.example:port/nightshift",
    "postgresql://bob:hidden@[::1/nightshift",
)


@pytest.mark.parametrize("url", BROKEN)
def test_what_is_no_url_is_refused_without_its_text(url: str) -> None:
    with pytest.raises(SettingsError) as asked:
        take_snapshot.sqlite_file(url)
    with pytest.raises(SettingsError) as opened:
        open_dialect(url, durable=True)
    for refused in (asked, opened):
        assert "postgresql://USER@HOST/DATABASE" in str(refused.value)
        assert "hidden" not in str(refused.value)
        assert refused.value.__cause__ is None


def test_only_sqlite_has_a_file() -> None:
    assert str(take_snapshot.sqlite_file("sqlite:////data/nightshift.db")) == "/data/nightshift.db"
    assert take_snapshot.sqlite_file("postgresql://db.example/nightshift") is None
