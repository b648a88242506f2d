"""compose.yaml, read by compose itself: what is healthy, what is reachable, what is kept."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from services.kit.messages.bus_roles import ROLES, authorization
from tests.deploy import files

pytestmark = pytest.mark.deploy

VLLM = ("executor-cpu", "executor-cuda")


def services() -> dict[str, dict[str, Any]]:
    """Return all services by name."""
    found: dict[str, dict[str, Any]] = files.compose()["services"]
    return found


def test_compose_takes_it() -> None:
    assert set(services()) == {
        *("nats", "postgres", "store", "scheduler", "gateway"),
        *("executor-simulated", *VLLM),
    }


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("healthcheck:", "healthchek:"),
        ("restart: unless-stopped", "restart: 5"),
        ("condition: service_healthy", "condition: service_happy"),
        ('volumes: ["data:/data"]', 'volumes: ["date:/data"]'),
        ("networks: [backend]", "networks: [back]"),
    ],
)
def test_compose_refuses_what_is_wrong(tmp_path: Path, right: str, wrong: str) -> None:
    text = files.COMPOSE.read_text()
    assert right in text
    broken = tmp_path / "compose.yaml"
    broken.write_text(text.replace(right, wrong, 1))
    assert files.run_compose("config", "--quiet", file=broken).returncode != 0


def test_without_a_profile_there_is_no_executor() -> None:
    started = {name for name, one in services().items() if not one.get("profiles")}
    assert started == {"nats", "postgres", "store", "scheduler", "gateway"}
    for name in ("simulated", "cpu", "cuda"):
        assert services()[f"executor-{name}"]["profiles"] == [name]


def test_every_service_is_restarted_and_its_logs_are_bounded() -> None:
    for name, one in services().items():
        assert one["restart"] == "unless-stopped", name
        assert {"max-size", "max-file"} <= set(one["logging"]["options"]), name


def test_every_service_has_a_health_check() -> None:
    for name, one in services().items():
        if "build" in one:
            assert files.last(one["build"]["target"], "HEALTHCHECK"), name
            # One place says how: the image.
            assert "healthcheck" not in one, name
        else:
            assert one["healthcheck"]["test"][0] == "CMD", name


def test_services_wait_for_what_they_need() -> None:
    for name, one in files.our_services().items():
        needs = set(one["depends_on"])
        assert all(it["condition"] == "service_healthy" for it in one["depends_on"].values()), name
        assert ("nats" in needs) == ("NIGHTSHIFT_NATS_URL" in one["environment"]), name
        assert ("store" in needs) == (name != "store"), name


def test_images_carry_the_projects_version_and_their_targets_name() -> None:
    project = tomllib.loads((files.ROOT / "pyproject.toml").read_text())["project"]
    for one in services().values():
        if "build" not in one:
            continue
        target = one["build"]["target"]
        assert target in files.stages()
        assert one["image"] == f"nightshift-{target}:{project['version']}"
        assert Path(one["build"]["context"]) / one["build"]["dockerfile"] == files.DOCKERFILE


def test_foreign_images_are_the_default_registrys_by_version() -> None:
    assert re.fullmatch(r"postgres:\d[\d.]*-alpine", services()["postgres"]["image"])


def test_the_brokers_permissions_are_those_that_services_are_tried_with() -> None:
    asked = authorization({role: f"${role}_password" for role in ROLES})
    assert (files.ROOT / "deploy/nats.conf").read_text().endswith(f"\n{asked}")


@pytest.mark.parametrize("name", ["nats.conf", "nats-cluster.conf"])
def test_the_broker_takes_its_configuration_and_the_readmes_secrets(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "etc" / "nightshift"
    folder.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    for file in ("nats.conf", "nats-cluster.conf"):
        shutil.copy(files.ROOT / "deploy" / file, folder)
    for text in re.findall(r"(?ms)^```sh\n(.*?)^```", files.README.read_text()):
        if "secrets/" in text and "postgresql://" not in text:
            made = text.partition("docker compose")[0]
            subprocess.run(["sh", "-euc", made], cwd=tmp_path / "run", check=True)
    server = str(files.SCRIPTS / "nats-server")
    done = subprocess.run(
        [server, "-t", "--config", str(folder / name), "--name", "one", "--jetstream"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_addresses_are_those_that_the_others_listen_on() -> None:
    listen = files.image_environment("store")["NIGHTSHIFT_STORE_LISTEN"]
    for name, one in files.our_services().items():
        for variable, value in one["environment"].items():
            if variable.endswith("_STORE"):
                assert value == f"store:{files.port_of(listen)}", name
            if variable == "NIGHTSHIFT_NATS_URL":
                assert value == "nats://nats:4222", name


def test_only_the_gateway_is_reachable_and_only_from_this_machine() -> None:
    published = {name: one["ports"] for name, one in services().items() if one.get("ports")}
    assert set(published) == {"gateway"}
    environment = files.image_environment("gateway")
    assert {one["host_ip"] for one in published["gateway"]} == {"127.0.0.1"}
    assert {one["target"] for one in published["gateway"]} == {
        files.port_of(environment["NIGHTSHIFT_GATEWAY_LISTEN"]),
        files.port_of(environment["NIGHTSHIFT_GATEWAY_GRPC_LISTEN"]),
    }


def test_services_meet_on_a_network_of_their_own() -> None:
    assert files.compose()["networks"]["backend"]["internal"]
    for name, one in services().items():
        outside = name in ("gateway", *VLLM)
        assert set(one["networks"]) == ({"backend", "edge"} if outside else {"backend"}), name


def test_secrets_are_files_and_each_has_only_its_own() -> None:
    own = {
        "nats": {"nats"},
        "postgres": {"postgres"},
        "gateway": {"nightshift"},
        "store": {"nightshift", "nats-store", "postgres"},
        "scheduler": {"nightshift", "nats-scheduler"},
    }
    for name, one in services().items():
        wanted = own.get(name, {"nightshift", "nats-executor"})
        assert {it["source"] for it in one["secrets"]} == wanted, name
    for name, one in files.our_services().items():
        environment = one["environment"]
        assert environment["NIGHTSHIFT_SECRET_FILE"] == "/run/secrets/nightshift", name
        if "NIGHTSHIFT_NATS_URL" in environment:
            role = one["build"]["target"].partition("-")[0]
            file = environment["NIGHTSHIFT_NATS_PASSWORD_FILE"]
            assert file == f"/run/secrets/nats-{role}", name
    for name, one in services().items():
        for variable, value in one.get("environment", {}).items():
            secret = re.search("PASSWORD|SECRET|TOKEN", variable)
            assert not secret or variable.endswith("_FILE") or not value, f"{name}: {variable}"


def test_containers_may_do_little_and_take_a_part_of_the_machine() -> None:
    for name, one in services().items():
        assert one["read_only"], name
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert 0 < int(one["pids_limit"]) <= 8_192, name
        assert 0 < int(one["mem_limit"]) <= 32 * 1024**3, name
        # Not root: by its image, or as it is said here.
        user = one.get("user") or files.last(one["build"]["target"], "USER")
        assert user in ("10001:10001", "postgres"), name


def test_state_is_in_named_volumes() -> None:
    def mounts(name: str) -> dict[str, str]:
        return {it["target"]: it["source"] for it in services()[name]["volumes"]}

    data = files.image_environment("store")["NIGHTSHIFT_STORE_DATA_DIR"]
    assert mounts("store") == {data: "data"}
    assert mounts("nats") == {"/data": "nats"}
    assert mounts("postgres") == {"/var/lib/postgresql/data": "postgres"}
    assert {"data", "nats", "postgres", "cache"} == set(files.compose()["volumes"])
    for name in VLLM:
        assert mounts(name)[files.image_environment(name)["HOME"]] == "cache"


def test_the_default_database_is_sqlite() -> None:
    environment = services()["store"]["environment"]
    assert environment["NIGHTSHIFT_STORE_DATABASE_URL"] == ""


def test_a_stop_leaves_time_to_drain() -> None:
    drain = files.settings_of("executor").model_fields["drain_seconds"].default
    for name, one in files.our_services().items():
        seconds = int(one["stop_grace_period"].removesuffix("s"))
        assert seconds >= (drain + 10 if name.startswith("executor") else 15), name


def test_every_value_that_may_be_set_is_told_of() -> None:
    done = files.run_compose("config", "--variables")
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert "NIGHTSHIFT_HTTP_PORT" in names
    readme = files.README.read_text()
    assert not [name for name in names if f"`{name}`" not in readme]
