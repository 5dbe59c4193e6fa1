"""The files in deploy/: units for systemd, a compose file, samples of configuration, checked with the programs that read them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.harness.cli_reference import verbs
from tests.harness.etcd_process import MISSING, is_installed
from turtlemq.server.config import Config, load

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
needs_etcd = pytest.mark.skipif(not is_installed(), reason=MISSING)
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
SERVICE_KEYS = {
    *"build command depends_on entrypoint environment healthcheck hostname image ports restart secrets stop_grace_period".split(),
    "volumes",
}


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return loaded


def config_of(service: dict[str, Any]) -> Config:
    return load({"host": "0.0.0.0"}, service["environment"], None)


def etcd_options() -> set[str]:
    help_ = subprocess.run(["etcd", "--help"], capture_output=True, text=True, timeout=30)
    return set(re.findall(r"^ +--([a-z-]+)", help_.stdout + help_.stderr, re.MULTILINE))


def test_the_sample_of_a_node_is_valid() -> None:
    config = load({}, {}, DEPLOY / "turtlemq-node.toml")
    assert (config.cluster.name, config.cluster.node) == ("prod", "a")
    assert len(config.cluster.etcd) == 3


def verified(folder: Path, unit: str) -> str:
    """Complaints of systemd about a unit in a folder."""
    done = subprocess.run(["systemd-analyze", "verify", str(folder / unit)], capture_output=True, text=True, timeout=30)
    return done.stdout + done.stderr


@needs_systemd
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "turtlemq.service").read_text()
    program = "/opt/turtlemq/.venv/bin/turtlemq"
    assert text.count(program) == 1
    (tmp_path / "turtlemq.service").write_text(text.replace(program, "/bin/true"))
    assert verified(tmp_path, "turtlemq.service") == ""
    (tmp_path / "turtlemq.service").write_text(text.replace(program, "/bin/true").replace("KillMode", "KilMode"))
    assert "KilMode" in verified(tmp_path, "turtlemq.service")


@needs_systemd
def test_systemd_understands_the_drop_in_for_etcd(tmp_path: Path) -> None:
    (tmp_path / "etcd.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "etcd.service.d").mkdir()
    shutil.copy(DEPLOY / "etcd" / "turtlemq.conf", tmp_path / "etcd.service.d")
    assert verified(tmp_path, "etcd.service") == ""


@needs_etcd
def test_etcd_knows_the_options_of_its_samples() -> None:
    known = etcd_options()
    assert len(known) > 50
    variables = dict(line.split("=", 1) for line in (DEPLOY / "etcd" / "default").read_text().splitlines() if line[:1] == "E")
    assert {name.removeprefix("ETCD_").lower().replace("_", "-") for name in variables} <= known
    services = compose()["services"]
    for name in ("etcd-1", "etcd-2", "etcd-3"):
        command = services[name]["command"]
        assert command[0] == "etcd"
        given = dict(word.removeprefix("--").split("=", 1) for word in command[1:])
        assert set(given) <= known
        assert given["name"] == name
        assert given["initial-advertise-peer-urls"] in given["initial-cluster"]


def test_nodes_of_the_compose_file_are_valid() -> None:
    services = compose()["services"]
    nodes = {name: config_of(service) for name, service in services.items() if name.startswith("node-")}
    assert list(nodes) == ["node-a", "node-b", "node-c"]
    for name, config in nodes.items():
        assert name == f"node-{config.cluster.node}" == services[name]["hostname"]
        assert (config.cluster.url, config.cluster.peer) == (f"http://{name}:8878", f"{name}:8900")
        assert config.cluster.secret_file == "/run/secrets/cluster"
        assert [url.split("/")[2].partition(":")[0] for url in config.cluster.etcd] == ["etcd-1", "etcd-2", "etcd-3"]
    assert len({config.cluster.name for config in nodes.values()}) == 1


def test_services_of_the_compose_file_refer_to_what_is_there() -> None:
    whole = compose()
    services = whole["services"]
    for service in services.values():
        assert set(service) <= SERVICE_KEYS
        assert set(service.get("depends_on", ())) <= set(services)
        assert set(service.get("secrets", ())) <= set(whole["secrets"])
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= set(whole["volumes"])
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    known = dict(verbs())
    (script,) = services["init"]["command"]
    calls = re.findall(r"turtlemq (cluster \w+)([^|;]*)", script)
    assert [verb for verb, _ in calls] == ["cluster init", "cluster status"]
    for verb, rest in calls:
        there = {option for parameter in known[f"turtlemq {verb}"].params for option in parameter.opts}
        assert {word for word in shlex.split(rest) if word.startswith("--")} <= there
