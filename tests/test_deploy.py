"""The files in deploy/: units for systemd, compose files, samples of configuration, checked with the programs that read them."""

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
from turtlemq import __version__
from turtlemq.server.auth import PROBES
from turtlemq.server.config import Config, load

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
needs_etcd = pytest.mark.skipif(not is_installed(), reason=MISSING)
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
SERVICE_KEYS = set(
    "build cap_drop command depends_on entrypoint environment hostname image ports read_only restart secrets security_opt"
    " stop_grace_period volumes".split()
)
COMPOSE_FILES = ("compose.yml", "compose-cluster.yml")


def compose(name: str = "compose-cluster.yml") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
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


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_services_of_a_compose_file_refer_to_what_is_there(name: str) -> None:
    whole = compose(name)
    services = whole["services"]
    for service in services.values():
        assert set(service) <= SERVICE_KEYS
        assert set(service.get("depends_on", ())) <= set(services)
        assert set(service.get("secrets", ())) <= set(whole.get("secrets", ()))
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in whole["volumes"]
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        if "build" in service and service["image"] == "turtlemq":
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
            load({}, service["environment"], None)
    names = [compose(other)["name"] for other in COMPOSE_FILES]
    assert len(set(names)) == len(names), "both can run on one machine"


def test_init_of_the_compose_file_calls_verbs_that_are_there() -> None:
    (script,) = compose()["services"]["init"]["command"]
    assert_init_script(script)


def assert_init_script(script: str) -> None:
    """A script that makes a cluster, or sees that there is one, with verbs and options of the program."""
    known = dict(verbs())
    calls = re.findall(r"turtlemq (cluster \w+)([^|;]*)", script)
    assert [verb for verb, _ in calls] == ["cluster init", "cluster status"]
    for verb, rest in calls:
        there = {option for parameter in known[f"turtlemq {verb}"].params for option in parameter.opts}
        assert {word for word in shlex.split(rest) if word.startswith("--")} <= there


def test_prometheus_and_grafana_find_what_they_show() -> None:
    services = compose("compose.yml")["services"]
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"turtlemq:{Config().port}"]}]
    alerts = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text())
    assert f'job="{job["job_name"]}"' in alerts["groups"][0]["rules"][0]["expr"]
    mounted = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert {f"/etc/prometheus/{file}" for file in ("prometheus.yml", *scrape["rule_files"])} <= set(mounted)
    (source,) = yaml.safe_load((DEPLOY / "grafana-datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana-dashboards.yml").read_text())["providers"]
    mounted = [volume.split(":")[:2] for volume in services["grafana"]["volumes"]]
    assert ["./grafana.json", f"{provider['options']['path']}/turtlemq.json"] in mounted
    assert ["./grafana-dashboards.yml", "/etc/grafana/provisioning/dashboards/turtlemq.yml"] in mounted


# Kubernetes

KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yml"))


def resources(file: str) -> dict[str, Any]:
    """The resources of a file of deploy/kubernetes, by kind and name."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text())
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def environment_of(container: dict[str, Any], pod: str) -> dict[str, str]:
    """The variables in a container of a pod, with `$(NAME)` replaced as Kubernetes does."""
    fields, known = {"metadata.name": pod, "metadata.namespace": "shop"}, dict[str, str]()
    for one in container["env"]:
        text = one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        known[one["name"]] = re.sub(r"\$\((\w+)\)", lambda match: known[match[1]], text)
    return known


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_kubernetes_knows_every_field(file: Path) -> None:
    import kubernetes_validate

    assert len(KUBERNETES) == 3
    for one in yaml.safe_load_all(file.read_text()):
        kubernetes_validate.validate(one, "1.30", strict=True)
        one["spec"]["no_such_field"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(one, "1.30", strict=True)


@pytest.mark.parametrize("file", ["single.yml", "cluster.yml"])
def test_pods_of_the_server_are_confined_and_probed(file: str) -> None:
    found = resources(file)
    spec = found["StatefulSet/turtlemq"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["serviceName"] in [name.partition("/")[2] for name in found if name.startswith("Service/")]
    assert container["image"] == f"turtlemq:{__version__}"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {pod['securityContext']['runAsUser']} " in (DEPLOY / "Dockerfile").read_text()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == Config().port
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert [probe["path"] for probe in probes.values()] == ["/readyz", "/readyz", "/healthz"]
    assert {probe["path"] for probe in probes.values()} == set(PROBES), "answered to every address"
    for service in (one for name, one in found.items() if name.startswith("Service/")):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
        assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "data"]
    assert container["command"][-1].startswith(f"{mount['mountPath']}/")
    told = load({"host": "0.0.0.0"}, environment_of(container, "turtlemq-0"), None)
    assert "turtlemq.shop.svc" in told.host_names


def test_nodes_in_kubernetes_are_valid() -> None:
    found, etcd = resources("cluster.yml"), resources("etcd.yml")["StatefulSet/turtlemq-etcd"]
    nodes = found["StatefulSet/turtlemq"]["spec"]
    pod = nodes["template"]["spec"]
    (container,) = pod["containers"]
    members = [f"http://turtlemq-etcd-{i}.{etcd['spec']['serviceName']}:2379" for i in range(etcd["spec"]["replicas"])]
    for name in (f"turtlemq-{i}" for i in range(nodes["replicas"])):
        cluster = load({"host": "0.0.0.0"}, environment_of(container, name), None).cluster
        assert (cluster.node, list(cluster.etcd)) == (name, members)
        host = f"{name}.{nodes['serviceName']}"
        assert (cluster.url, cluster.peer) == (f"http://{host}:8878", f"{host}:8900")
        (mount,) = [one for one in container["volumeMounts"] if one["name"] == "secret"]
        assert cluster.secret_file == f"{mount['mountPath']}/secret"
    assert found["Service/turtlemq-nodes"]["spec"]["publishNotReadyAddresses"] is True
    assert found["PodDisruptionBudget/turtlemq"]["spec"]["maxUnavailable"] == 1
    (init,) = found["Job/turtlemq-init"]["spec"]["template"]["spec"]["containers"]
    assert init["image"] == container["image"]
    assert_init_script(init["command"][2])
    assert set(re.findall(r"--etcd ([^\s;]+)", init["command"][2])) <= set(members)


@needs_etcd
def test_etcd_in_kubernetes_has_options_that_it_knows() -> None:
    (container,) = resources("etcd.yml")["StatefulSet/turtlemq-etcd"]["spec"]["template"]["spec"]["containers"]
    given = dict(word.removeprefix("--").split("=", 1) for word in container["command"][1:])
    assert set(given) <= etcd_options()
    for i in range(3):
        own = given["initial-advertise-peer-urls"].replace("$(POD_NAME)", f"turtlemq-etcd-{i}")
        assert f"turtlemq-etcd-{i}={own}" in given["initial-cluster"].split(",")
