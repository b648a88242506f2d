"""The Nomad job, parsed: its images, ports and secret are those of the rest of deploy/."""

import re
import tomllib
from pathlib import Path
from typing import Any

import hcl2
import pytest

from tests.deploy import files

pytestmark = pytest.mark.deploy


def tasks() -> dict[str, dict[str, Any]]:
    """Return all tasks by group and name."""
    return {
        f"{group}/{name}": task
        for group, body in files.nomad_groups().items()
        for name, task in files.labelled(body["task"]).items()
    }


def image_of(task: dict[str, Any]) -> str:
    """Return a task's image with the variables' defaults in it."""
    return files.filled_in(task["config"][0]["image"])


def test_the_job_has_all_services() -> None:
    assert set(tasks()) == {
        *("services/nats", "services/store", "services/scheduler", "services/gateway"),
        *("executor-simulated/executor", "executor-cuda/executor"),
    }


def test_the_parser_refuses_what_is_no_hcl() -> None:
    text = files.NOMAD.read_text()
    with pytest.raises(Exception, match="Unexpected"):
        hcl2.loads(text.removesuffix("}\n"))


def test_every_variable_that_is_used_is_declared_and_the_other_way_round() -> None:
    text = files.NOMAD.read_text()
    used = set(re.findall(r"\bvar\.(\w+)", text))
    assert used == set(files.nomad_variables())


def test_images_are_those_of_compose() -> None:
    composed = {one["image"] for one in files.compose()["services"].values()}
    for name, task in tasks().items():
        assert image_of(task) in composed, name


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((files.ROOT / "pyproject.toml").read_text())["project"]
    assert files.nomad_variables()["version"] == project["version"]


def test_ports_are_those_that_the_services_listen_on() -> None:
    ports = files.labelled(files.nomad_groups()["services"]["network"][0]["port"])
    gateway = files.image_environment("gateway")
    assert {name: one["to"] for name, one in ports.items()} == {
        "http": files.port_of(gateway["NIGHTSHIFT_GATEWAY_LISTEN"]),
        "grpc": files.port_of(gateway["NIGHTSHIFT_GATEWAY_GRPC_LISTEN"]),
        "store": files.port_of(files.image_environment("store")["NIGHTSHIFT_STORE_LISTEN"]),
        "nats": 4222,
    }
    # None is on a network that the operator has not named.
    assert {one["host_network"] for one in ports.values()} == {"${var.private_network}"}
    for name, task in tasks().items():
        assert set(task["config"][0].get("ports", [])) <= set(ports), name


def test_services_of_one_group_meet_on_loopback() -> None:
    store = files.port_of(files.image_environment("store")["NIGHTSHIFT_STORE_LISTEN"])
    for name, task in tasks().items():
        if name.startswith("services/") and "env" in task:
            for variable, value in task["env"][0].items():
                if variable.endswith("_STORE"):
                    assert value == f"127.0.0.1:{store}", name
                if variable == "NIGHTSHIFT_NATS_URL":
                    assert value == "nats://127.0.0.1:4222", name


def test_what_executors_look_up_is_registered_and_checked() -> None:
    services = files.nomad_groups()["services"]["service"]
    registered = {one["name"] for one in services}
    looked_up = set(re.findall(r'nomadService "([\w-]+)"', files.NOMAD.read_text()))
    assert looked_up == {"nightshift-nats", "nightshift-store"}
    assert looked_up <= registered
    for one in services:
        assert one["provider"] == "nomad"
        assert one["check"][0]["type"] in ("http", "tcp")


def test_secrets_are_files_from_nomads_variables() -> None:
    for name, task in tasks().items():
        environment = task.get("env", [{}])[0]
        paths = {to for variable, to in environment.items() if variable.endswith("_FILE")}
        assert paths or name == "services/nats"
        for path in paths:
            assert Path(path).parent == Path("${NOMAD_SECRETS_DIR}"), name
            (secret,) = (one for one in task["template"] if one["destination"] == path)
            assert "nomadVar" in secret["data"], name
    for variable in re.findall(r"\.(nats_\w+|secret) \}\}", files.NOMAD.read_text()):
        assert f"{variable}=$(openssl" in files.README.read_text()


def test_tasks_may_do_little() -> None:
    for name, task in tasks().items():
        config = task["config"][0]
        assert config["readonly_rootfs"] is True, name
        assert config["cap_drop"] == ["all"], name
        assert config["security_opt"] == ["no-new-privileges"], name
        assert 0 < config["pids_limit"] <= 8_192, name
        assert task["resources"][0]["memory"] > 0, name


def test_a_stop_leaves_time_to_drain() -> None:
    for name, task in tasks().items():
        if "env" in task:
            drain = int(task["env"][0].get("NIGHTSHIFT_EXECUTOR_DRAIN_SECONDS", 10))
            assert int(task["kill_timeout"].removesuffix("s")) >= drain + 10, name


def test_the_store_keeps_its_data_on_the_nodes_volume() -> None:
    volumes = files.labelled(files.nomad_groups()["services"]["volume"])
    for name in ("services/nats", "services/store"):
        (mount,) = tasks()[name]["volume_mount"]
        assert mount["volume"] in volumes
    store = tasks()["services/store"]
    data = store["env"][0]["NIGHTSHIFT_STORE_DATA_DIR"]
    assert data.startswith(store["volume_mount"][0]["destination"] + "/")
    assert files.nomad_groups()["services"]["count"] == 1


def test_executors_of_one_group_have_names_of_their_own() -> None:
    for name, task in tasks().items():
        if name.startswith("executor-"):
            assert task["env"][0]["NIGHTSHIFT_EXECUTOR_NAME"].endswith("-${NOMAD_ALLOC_INDEX}")
