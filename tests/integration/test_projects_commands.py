"""`nightshift projects`, as an operator types it."""

import json
from pathlib import Path

import pytest

from services.cli.shared.ports import is_open
from services.cli.up.plan import Address
from tests.integration.test_keys_commands import create, nightshift
from tests.kit.store import store_process
from tests.kit.up import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_quotas_are_set_and_listed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    create(data, "alpha")
    with store_process(data) as store:
        wait_until(lambda: is_open(Address("127.0.0.1", int(store.address.rpartition(":")[2]))))

        def projects(*arguments: str) -> str:
            secret = str(data / "secret")
            done = nightshift(
                "projects", *arguments, "--store", store.address, NIGHTSHIFT_SECRET_FILE=secret
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        said = projects("set-quota", "alpha", "2G")
        assert said == "alpha: 2147483648 bytes, 0 used\n"
        alpha, default = (json.loads(line) for line in projects("list", "--json").splitlines())
        assert (alpha["id"], alpha["quota_bytes"], alpha["used_bytes"]) == ("alpha", 2 << 30, 0)
        assert default["id"] == "default"
        assert (default["quota_bytes"], default["limit_bytes"]) == (None, None)
        assert projects("set-quota", "alpha", "none") == "alpha: no limit, 0 used\n"
        assert "alpha    " in projects("list")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["set-quota", "alpha", "much"], "no size such as 500G"),
        (["set-quota", "alpha", "99999999999T"], "no size such as 500G"),
        (["list", "--data", "/nowhere/at/all"], "nothing at /nowhere/at/all"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = nightshift("projects", *arguments)
    assert done.returncode != 0
    assert says in done.stderr
