"""compose.production.yaml over compose.yaml, read by compose itself: all parts fit together."""

import functools
import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from services.kit.process.addresses import parse_addresses
from tests.deploy import files

pytestmark = pytest.mark.deploy

PRODUCTION: Final = files.COMPOSE.with_name("compose.production.yaml")
GIVEN: Final = {
    "NIGHTSHIFT_STORE_BLOBS_URL": "s3://my-bucket/nightshift",
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_ENDPOINT_URL": "http://minio.example:9000",
}
NATS: Final = ("nats", "nats-2", "nats-3")
STORES: Final = ("store", "store-2")
GATEWAYS: Final = ("gateway", "gateway-2")


@functools.cache
def services() -> dict[str, dict[str, Any]]:
    """Return all services by name."""
    done = files.run_compose(
        *("--file", str(PRODUCTION), "config", "--format", "json"), environment=GIVEN
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    """Return those that run our code."""
    return {name: one for name, one in services().items() if files.is_ours(one)}


def test_what_has_to_be_given_is_asked_for() -> None:
    name = "NIGHTSHIFT_STORE_BLOBS_URL"
    given = {key: value for key, value in GIVEN.items() if key != name}
    done = files.run_compose("--file", str(PRODUCTION), "config", environment=given)
    assert done.returncode != 0
    assert name in done.stderr


def test_there_are_several_of_each() -> None:
    assert {*NATS, *STORES, *GATEWAYS, "scheduler", "postgres"} <= set(services())
    assert services()["scheduler"]["deploy"]["replicas"] == 2
    # Replicas share their environment, and may not share a name.
    assert "NIGHTSHIFT_SCHEDULER_NAME" not in services()["scheduler"]["environment"]


def test_the_brokers_are_one_cluster_and_each_keeps_its_own() -> None:
    commands = {name: services()[name]["command"] for name in NATS}
    assert len({tuple(command) for command in commands.values()}) == 1
    words = dict(word.partition("=")[::2] for word in commands["nats"])
    assert words["--config"] == "/etc/nightshift/nats-cluster.conf"
    configured = files.COMPOSE.with_name("nats-cluster.conf").read_text()
    # They are the README's to make, since each holds the password.
    told = re.findall(r"nats://route:\$route@([\w-]+):(\d+)", files.README.read_text())
    assert [host for host, _ in told] == list(NATS)
    assert all(f'listen: "0.0.0.0:{port}"' in configured for _, port in told)
    assert "--jetstream" in words
    for name in NATS:
        one = services()[name]
        # By which each is known to the others.
        assert one["hostname"] == name
        assert {it["source"] for it in one["secrets"]} == {"nats", "nats-routes"}
        assert "$$HOSTNAME" in one["entrypoint"][2]
        [volume] = one["volumes"]
        assert (volume["source"], volume["target"]) == (name, words["--store_dir"])


def test_everyone_is_told_of_all_brokers_and_stores() -> None:
    stores = ",".join(f"{name}:7401" for name in STORES)
    for name, one in ours().items():
        service, environment = one["build"]["target"].partition("-")[0], one["environment"]
        reads = files.variables_of(service)
        if "NIGHTSHIFT_NATS_URL" in reads:
            hosts = [
                urlsplit(url).hostname for url in environment["NIGHTSHIFT_NATS_URL"].split(",")
            ]
            assert hosts == list(NATS), name
            assert environment["NIGHTSHIFT_NATS_REPLICAS"] == str(len(NATS)), name
        if service != "store":
            assert environment[f"NIGHTSHIFT_{service.upper()}_STORE"] == stores, name
            assert len(parse_addresses(stores)) == len(STORES)


def test_the_stores_share_rows_and_blobs_and_nothing_else() -> None:
    first, second = (services()[name] for name in STORES)
    assert first["environment"] == second["environment"]
    url = urlsplit(first["environment"]["NIGHTSHIFT_STORE_DATABASE_URL"])
    assert (url.scheme, url.hostname, url.password) == ("postgresql", "postgres", None)
    password = first["environment"]["NIGHTSHIFT_STORE_DATABASE_PASSWORD_FILE"]
    assert password == "/run/secrets/postgres"
    assert first["environment"]["NIGHTSHIFT_STORE_BLOBS_URL"].startswith("s3://")
    assert first["environment"]["AWS_ENDPOINT_URL"] == GIVEN["AWS_ENDPOINT_URL"]
    # Not set, so not handed on as an empty one.
    assert first["environment"].get("AWS_REGION") is None
    assert [one["volumes"][0]["source"] for one in (first, second)] == ["data", "data-2"]
    for one in (first, second):
        assert {*NATS, "postgres"} == set(one["depends_on"])


def test_the_gateways_are_published_to_this_machine_each_on_ports_of_its_own() -> None:
    published = [port for name in GATEWAYS for port in services()[name]["ports"]]
    assert len({port["published"] for port in published}) == len(published) == 4
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    for name in GATEWAYS:
        grace = services()[name]["stop_grace_period"]
        delay = float(services()[name]["environment"]["NIGHTSHIFT_GATEWAY_DRAIN_DELAY_SECONDS"])
        # It still has its ten seconds for what runs.
        assert delay + 10 < float(grace.removesuffix("s"))


def test_settings_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, one in ours().items():
        service = one["build"]["target"].partition("-")[0]
        given = files.image_environment(one["build"]["target"]) | one["environment"]
        assert {key for key in given if key.startswith("NIGHTSHIFT_")} <= files.variables_of(
            service
        ), name
        with monkeypatch.context() as patched:
            for key, value in given.items():
                if key.startswith("NIGHTSHIFT_"):
                    patched.setenv(key, value)
            files.settings_of(service).load()


def test_the_readme_tells_how_to_start_it() -> None:
    text = files.README.read_text()
    assert f"-f {Path(PRODUCTION).name}" in text
    assert "export NIGHTSHIFT_STORE_BLOBS_URL=" in text
