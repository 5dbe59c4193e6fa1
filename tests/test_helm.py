"""The Helm chart: a real `helm template` makes what deploy/kubernetes has, and every value arrives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from turtlemq import __version__

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm/turtlemq"
CLUSTER = CHART / "values-cluster.yaml"
HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="there is no helm: run `make tools`")


def helm(*args: str | Path) -> subprocess.CompletedProcess[str]:
    assert HELM is not None, "tests are skipped without it"
    return subprocess.run([HELM, *args], capture_output=True, text=True, timeout=60)


def rendered(*files: Path, **values: Any) -> dict[str, Any]:
    """The resources that the chart makes for a release named `turtlemq`, by kind and name; a Job without the hash in its name."""
    options = [word for file in files for word in ("--values", str(file))]
    options += [word for name, value in values.items() for word in ("--set-json", f"{name}={json.dumps(value)}")]
    done = helm("template", "turtlemq", CHART, *options)
    assert done.returncode == 0, done.stderr
    found = {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(done.stdout)}
    return {re.sub(r"(Job/.*-init)-[0-9a-f]{8}$", r"\1", name): one for name, one in found.items()}


def plain(file: str) -> dict[str, Any]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text())
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def pod(resources: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = resources["StatefulSet/turtlemq"]["spec"]["template"]["spec"]
    return found


def variables(resources: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in pod(resources)["containers"][0]["env"] if "value" in one}


def cluster_of(resources: Mapping[str, Any]) -> dict[str, Any]:
    """The table `cluster` in a variable of the pod, taken out."""
    (found,) = (one for one in pod(resources)["containers"][0]["env"] if one["name"] == "TURTLEMQ_CLUSTER")
    table: dict[str, Any] = json.loads(found.pop("value"))
    return table


def test_a_single_server_is_the_one_of_the_manifest() -> None:
    assert rendered() == plain("single.yml")


def test_a_cluster_is_the_one_of_the_manifest() -> None:
    ours, theirs = rendered(CLUSTER), plain("cluster.yml")
    ours["Job/turtlemq-init"]["metadata"]["name"] = "turtlemq-init"
    assert cluster_of(ours) == cluster_of(theirs)
    assert ours == theirs


def test_values_of_the_chart_arrive() -> None:
    found = rendered(
        image={
            "repository": "registry.example/turtlemq",
            "tag": "9",
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "registry"}],
        },
        storage={"size": "1Ti", "className": "fast"},
        allowedHosts="192.0.2.0/24",
        configSecret="settings",
        environment={"TURTLEMQ_MAX_TOPICS": "5"},
        nodeSelector={"disk": "nvme"},
        tolerations=[{"key": "queue", "operator": "Exists"}],
    )
    spec, (container,) = pod(found), pod(found)["containers"]
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example/turtlemq:9", "Always")
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (claim,) = found["StatefulSet/turtlemq"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "1Ti"}}
    assert claim["spec"]["storageClassName"] == "fast"
    given = variables(found)
    assert (given["TURTLEMQ_ALLOWED_HOSTS"], given["TURTLEMQ_MAX_TOPICS"]) == ("192.0.2.0/24", "5")
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "config"]
    assert given["TURTLEMQ_CONFIG"] == f"{mount['mountPath']}/turtlemq.toml"
    assert spec["volumes"] == [{"name": "config", "secret": {"secretName": "settings", "defaultMode": 0o440}}]
    assert (spec["nodeSelector"], spec["tolerations"]) == ({"disk": "nvme"}, [{"key": "queue", "operator": "Exists"}])


@pytest.mark.parametrize("files", [(), (CLUSTER,)], ids=["single", "cluster"])
def test_kubernetes_knows_every_field_of_the_chart(files: tuple[Path, ...]) -> None:
    import kubernetes_validate

    every = {"pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]}
    for one in rendered(*files, image=every, configSecret="settings", nodeSelector={"a": "b"}, environment={"A": 1}).values():
        kubernetes_validate.validate(one, "1.30", strict=True)


def test_commands_of_the_documentation_work() -> None:
    lines = re.findall(r"^helm install (.*)$", (DEPLOY.parent / "docs/OPERATIONS.md").read_text("utf-8"), re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        done = helm("template", *(word.replace("deploy/", f"{DEPLOY}/") for word in line.split()))
        assert "image: registry.example/turtlemq:" in done.stdout, done.stderr


def test_an_upgrade_makes_another_job() -> None:
    names = {rendered(CLUSTER, image={"tag": tag})["Job/turtlemq-init"]["metadata"]["name"] for tag in ("1", "2")}
    assert len(names) == 2, "the template of a Job cannot be changed"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("nodes=3", "several nodes need a name server: give cluster.etcd"),
        ("replicas=3", "replicas"),
        ("cluster.etcd={etcd:2379}", "cluster"),
    ],
)
def test_values_that_would_do_nothing_are_refused(value: str, says: str) -> None:
    done = helm("template", "turtlemq", CHART, "--set", value)
    assert done.returncode != 0
    assert says in done.stderr


def test_the_chart_is_linted_and_of_this_version() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, "--values", CLUSTER).stdout
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
