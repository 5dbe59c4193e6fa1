"""Configuration: which source wins, refused values, shown values; and docs/CONFIGURATION.md says the truth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner, Result

from tests.harness import settings_reference
from tests.harness.server_process import ROOT, running
from turtlemq.cli.verbs import command_line
from turtlemq.errors import InvalidArgument
from turtlemq.server.auth import RIGHTS, hash_of, new_token
from turtlemq.server.cluster_config import parse_address, read_secret
from turtlemq.server.config import HIDDEN, TABLES, Config, in_force, load, resolve
from turtlemq.server.operations import ACCESS
from turtlemq.server.replication import identity_of
from turtlemq.server.topic_settings import TopicSettings, to_flat, to_nested
from turtlemq.settings import TABLE, Settings, check_settings

DOC = (ROOT / "docs/CONFIGURATION.md").read_text("utf-8")


def cli(*args: str, **env: str) -> Result:
    return CliRunner().invoke(command_line(*args[:1]), list(args), env={"COLUMNS": "200", **env})


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('host = "::1"\nport = 1\ntick_ms = 1\n[defaults]\nttr = 5\n[defaults.backoff]\nbase = 3\n')
    config, origins = resolve({"port": 3, "data": None}, {"TURTLEMQ_PORT": "2", "TURTLEMQ_TICK_MS": "2", "PATH": "x"}, file)
    assert (config.host, config.port, config.tick_ms, config.data) == ("::1", 3, 2, "data")
    assert origins == {"host": str(file), "port": "--port", "tick_ms": "TURTLEMQ_TICK_MS", "defaults": str(file)}
    shown = in_force(config, origins)
    assert shown["port"] == (3, "--port")
    assert shown["data"] == ("data", "default")
    assert shown["defaults.ttr"] == (5, str(file))
    assert shown["defaults.backoff.base"] == (3, str(file))
    assert shown["retry_delay_ms"] == (3000, str(file))
    assert shown["defaults.backoff.factor"] == (2, "default")


def test_every_setting_can_be_told_by_the_environment() -> None:
    token = {"name": "a", "hash": hash_of(new_token()), "rights": ["admin"], "topics": ["x*"]}
    told: dict[str, Any] = {
        "data": "d",
        "data_mode": "0750",
        "host": "h",
        "port": 1,
        "allowed_hosts": "10.0.0.0/8, ::1",
        "host_names": "a.example, b.example",
        "tls_cert": "c",
        "tls_key": "k",
        "tokens": json.dumps([token]),
        "tenants": json.dumps([{"name": "shop", "topics": ["shop.*"], "weight": 2, "max_in_flight": 5}]),
        "auto_create_topics": "false",
        "reject_past": "1",
        "max_delay_days": 0.5,
        "max_body_bytes": 2048,
        "max_held_bytes": 1 << 21,
        "max_topics": 5,
        "max_groups": 6,
        "max_connections": 5,
        "max_waiting": 0,
        "body_timeout_s": 1.5,
        "client_produce_per_s": 2.5,
        "client_burst": 7,
        "tick_ms": 10,
        "virtual_clock": "false",
        "beat_ms": 100,
        "log_format": "json",
        "log_level": "error",
        "slow_request_ms": 5,
        "tracing": True,
        "push_hosts": "hooks.shop.example, 10.0.0.0/8:*",
        "push_timeout_s": 5,
        "push_connections": 9,
        "grpc_port": 7000,
        "grpc_host": "::1",
        "grpc_window": 8,
        "grpc_past_grace_ms": -1,
        "grpc_beat_s": 2.5,
        "grpc_topic_prefix": "delay.",
        "max_delivery_retries": 3,
        "retry_delay_ms": 250,
        "cluster": json.dumps({"name": "p", "node": "a", "peer": "a:1", "secret_file": "s", "etcd": ["http://e:1"]}),
        "defaults": json.dumps({"ttr": 1.5, "rate": {"deliver_per_s": 9}}),
    }
    assert {*told, "shards"} == set(Config.__struct_fields__)  # which do not go with gRPC and a cluster
    config, origins = resolve({}, {f"TURTLEMQ_{name.upper()}": str(value) for name, value in told.items()}, None)
    plain = Config()
    told_like_plain = [name for name in told if getattr(config, name) == getattr(plain, name)]
    assert told_like_plain == ["virtual_clock"], "which goes with no cluster"
    assert origins == {name: f"TURTLEMQ_{name.upper()}" for name in told}
    assert config.allowed_hosts == ("10.0.0.0/8", "::1")
    settings = config.topic_defaults()
    assert (settings.max_attempts, settings.backoff_base_ms, settings.beat_ms, settings.ttr_ms) == (4, 250, 100, 1500)
    assert settings.rate_deliver_per_s == 9


def test_names_of_the_command_line_are_not_settings_of_the_server() -> None:
    names = ("URL", "TOKEN", "CACERT", "CONFIG")
    assert load({}, {f"TURTLEMQ_{name}": "x" for name in names}, None) == Config()


CLUSTER = '[cluster]\nname = "p"\nnode = "a"\nsecret_file = "s"\n'
ETCD = f'{CLUSTER}peer = "a:1"\netcd = ["http://e:2379"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "did you mean port?"),
        ("allowed_host = []", "did you mean allowed_hosts?"),
        ("qqq = 1", "there are: data, data_mode"),
        ("[cluster]\nnam = 5", "cluster: unknown setting 'nam'; did you mean name?"),
        ('[cluster]\nnode = "a"', "cluster.name is missing"),
        ('[cluster]\nname = "a b"\nnode = "a"', "cluster.name is 1 to 64"),
        ('[cluster]\nname = "p"', "cluster.node is 1 to 64"),
        ('[cluster]\nname = "p"\nnode = "a"', "cluster.secret_file is missing"),
        (f'{CLUSTER}peer = "a:1"', "cluster.etcd is missing"),
        (f'{CLUSTER}etcd = ["http://e:1"]\npeer = "8900"', "on which other nodes find this one, as host:port, not '8900'"),
        (f'{CLUSTER}peer = "a:1"\nring_bytes = 5', "ring_bytes"),
        (f'{CLUSTER}peer = "a:1"\nacks = "all"', "acks"),
        (f'{CLUSTER}etcd = ["http://e:2379"]', "cluster.peer is the address on which other nodes find this one"),
        (f'{CLUSTER}peer = "a:1"\netcd = ["e:2379"]', "cluster.etcd is http://host:port or https://host:port, not 'e:2379'"),
        (f'{ETCD}url = "a:1"', "cluster.url is http://host:port"),
        (f"{ETCD}heartbeat_ms = 800", "cluster.lease_s is at least 4 heartbeats"),
        (f'{ETCD}etcd_user = "u"', "cluster.etcd_user and cluster.etcd_password_file go together"),
        (f'{ETCD}etcd_cert = "u"', "cluster.etcd_cert and cluster.etcd_key go together"),
        (f'{ETCD}tls_cert = "u"\ntls_key = "v"', "cluster.tls_cert, cluster.tls_key and cluster.tls_ca go together"),
        ("[defaults]\nttr_ms = 5", "did you mean ttr?"),
        ("[defaults]\nbackof = {}", "did you mean backoff?"),
        ("[defaults.rate]\nproduce = 5", "rate: unknown setting 'produce'; did you mean produce_per_s?"),
        ("[defaults]\nttr = -1", "ttr"),
        ("[defaults]\nttr = nan", "ttr"),
        ("[defaults]\nmax_attempts = 0", "max_attempts"),
        ('[defaults]\ndelivery = "maybe"', "at-least-once"),
        ("defaults = 5", "defaults: Expected `object`"),
        ("port = 'x'", "port: Expected `int`"),
        ("port = 70000", "port: Expected `int` <= 65535"),
        ("reject_past = 1", "reject_past: Expected `bool`"),
        ("tick_ms = -1", "tick_ms"),
        ("beat_ms = 1", "beat_ms"),
        ("max_delay_days = inf", "max_delay_days"),
        ("body_timeout_s = 0", "body_timeout_s"),
        ("max_connections = 0", "max_connections"),
        ("max_body_bytes = 1000000000", "max_held_bytes is at least twice"),
        ("client_produce_per_s = 1e-9", "client_produce_per_s"),
        ("allowed_hosts = ['x']", "allowed_hosts: 'x' is no address"),
        ("tls_cert = 'a.pem'", "tls_cert and tls_key go together"),
        ("tokens = [{name = 'a'}]", "missing required field `hash`"),
        ("grpc_port = 70000", "grpc_port"),
        ("[[tenants]]\nname = 'a'", "missing required field `topics`"),
        ("[[tenants]]\nname = 'a/b'\ntopics = ['x']", "matching regex"),
        ("[[tenants]]\nname = 'a'\ntopics = []", "length >= 1"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x']\nwieght = 2", "unknown field `wieght`"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x']\nweight = 0", "weight"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x']\nweight = nan", "weight"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x']\nmax_bytes = -1", "max_bytes"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x']\nproduce_per_s = 1e-9", "produce_per_s is at least 0.001"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x']\nbytes_per_s = 0.5", "bytes_per_s is at least 1"),
        ("[[tenants]]\nname = 'a'\ntopics = ['x/y']", "topics are names in which * stands for any characters"),
        ("tenants = [{name='a', topics=['x']}, {name='a', topics=['y']}]", "tenant 'a': another tenant has the same name"),
        ("tenants = [{name='a', topics=['x']}, {name='b', topics=['x']}]", "'x' belongs to tenant 'a' already"),
        ("= 1", "TOML"),
        (f"port = {'[' * 9_000}", "TOML"),
        (f"port = {'9' * 5_000}", "TOML"),
        ("\xff", "TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "t.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=re.escape(said)) as error:
        load({}, {}, file)
    assert str(file) in str(error.value), "and where"
    found = cli("config", "--config", str(file))
    assert found.exit_code == 2


def test_a_wrong_environment_says_what_is_wrong() -> None:
    for name, text, said in (
        ("PROT", "1", "did you mean port?"),
        ("PORT", "x", "TURTLEMQ_PORT: port"),
        ("TOKENS", "{", "as JSON"),
        ("DEFAULTS", "[]", "TURTLEMQ_DEFAULTS"),
        ("REJECT_PAST", "perhaps", "TURTLEMQ_REJECT_PAST"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            load({}, {f"TURTLEMQ_{name}": text}, None)
    with pytest.raises(InvalidArgument, match=r"nothing\.toml cannot be read"):
        load({}, {}, Path("nothing.toml"))


# The variables in a pod of Kubernetes, for Services named turtlemq and turtlemq-eu with a named port
SERVICES: dict[str, Any] = {
    f"{name}_{key}": text
    for name in ("TURTLEMQ", "TURTLEMQ_EU")
    for key, text in {
        "SERVICE_HOST": "10.96.0.7",
        "SERVICE_PORT": "8878",
        "SERVICE_PORT_HTTP": "8878",
        "PORT": "tcp://10.96.0.7:8878",
        "PORT_8878_TCP": "tcp://10.96.0.7:8878",
        "PORT_8878_TCP_PROTO": "tcp",
        "PORT_8878_TCP_PORT": "8878",
        "PORT_8878_TCP_ADDR": "10.96.0.7",
    }.items()
}


def test_variables_of_a_kubernetes_service_are_no_settings(tmp_path: Path) -> None:
    assert load({}, SERVICES, None) == Config()
    config, origins = resolve({}, SERVICES | {"TURTLEMQ_HOST": "::1"}, None)
    assert (config.host, origins) == ("::1", {"host": "TURTLEMQ_HOST"})
    with running(tmp_path / "data", **SERVICES) as server:
        assert server.call("GET", "/readyz").status == 200


@pytest.mark.parametrize("key", ["TURTLEMQ_SERVICE", "TURTLEMQ_SERVICE_HOSTS", "TURTLEMQ_PORT_8878", "TURTLEMQ_PORTS"])
def test_variables_that_only_resemble_those_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="unknown setting"):
        load({}, {key: "tcp://10.96.0.7:8878"}, None)


def test_settings_are_the_same_in_both_forms() -> None:
    import msgspec

    odd = Settings(ttr_ms=1500, max_delay_ms=5000, rate_produce_per_s=2.5, rate_burst=7, rate_deliver_per_s=3, beat_ms=250)
    flat = to_flat(msgspec.convert(to_nested(odd), TopicSettings))
    assert flat == {name: getattr(odd, name) for name in flat}
    assert set(Settings.__dataclass_fields__) - set(flat) == {"segment_messages", "run_messages"}, "of the engine's own"


def test_every_setting_has_a_text_and_a_default_within_its_limits() -> None:
    check_settings(Settings())
    assert [row.name for row in TABLE if not row.text] == []
    assert len({row.path for row in TABLE if row.path}) == sum(1 for row in TABLE if row.path), "each name over HTTP once"


# The command line


def test_config_shows_what_is_in_force_and_no_secret(tmp_path: Path) -> None:
    made = cli("token", "shop", "--right", "produce", "--topic", "orders*", "--topic", "mail.eu")
    assert made.exit_code == 0
    (secret,) = re.findall(r"tmq_\S+", made.stderr)
    assert secret not in made.stdout
    file = tmp_path / "t.toml"
    file.write_text("port = 7\n" + made.stdout)
    (token,) = load({}, {}, file).tokens
    assert (token.name, token.hash, token.rights, token.topics) == ("shop", hash_of(secret), ("produce",), ("orders*", "mail.eu"))
    for args in (("--json",), ()):
        found = cli("config", "--config", str(file), "--host", "::1", *args, TURTLEMQ_TICK_MS="5")
        assert found.exit_code == 0, found.output
        assert token.hash.rpartition(":")[2] not in found.output
        assert secret not in found.output
        assert "shop" in found.output
    shown = json.loads(cli("config", "--json", TURTLEMQ_CONFIG=str(file), TURTLEMQ_TICK_MS="5").stdout)
    assert shown["port"] == {"value": 7, "from": str(file)}
    assert shown["tick_ms"] == {"value": 5, "from": "TURTLEMQ_TICK_MS"}
    assert shown["tokens"]["value"][0]["hash"] == HIDDEN
    assert shown["defaults.rate.burst"] == {"value": 0, "from": "default"}
    assert shown["cluster.name"] == {"value": "", "from": "default"}
    assert set(Config.__struct_fields__) - set(TABLES) <= set(shown)


@pytest.mark.parametrize("args", [("a/b",), ("",), ("a", "--right", "fetch"), ("a", "--topic", "x y"), ("a", "--topic", "")])
def test_tokens_that_cannot_be(args: tuple[str, ...]) -> None:
    found = cli("token", *args)
    assert (found.exit_code, "tmq_" in found.output) == (2, False)


def test_a_token_without_rights() -> None:
    assert json.loads(cli("token", "prometheus", "--right", "none", "--json").stdout)["rights"] == []


def test_a_token_from_the_command_line_opens_the_server(tmp_path: Path) -> None:
    made = json.loads(cli("token", "me", "--json").stdout)
    secret = made.pop("token")
    (tmp_path / "t.toml").write_text('data = "elsewhere"\n')
    with running(tmp_path / "data", TURTLEMQ_CONFIG=str(tmp_path / "t.toml"), TURTLEMQ_TOKENS=json.dumps([made])) as server:
        refused = cli("put", "orders", "1", TURTLEMQ_URL=server.url)
        assert (refused.exit_code, "UNAUTHENTICATED" in refused.output) == (1, True)
        assert cli("put", "orders", "1", "--url", server.url, "--token", secret).exit_code == 0
        assert cli("put", "orders", "2", TURTLEMQ_URL=server.url, TURTLEMQ_TOKEN=secret).exit_code == 0
        assert cli("dead", "summary", "orders", "--url", server.url, "--token", secret).exit_code == 0
        assert cli("put", "orders", "3", TURTLEMQ_URL=server.url).exit_code == 1, "an option is not remembered"
        assert secret not in server.log
    assert not (tmp_path / "elsewhere").exists(), "a flag beats the file"


# docs/CONFIGURATION.md


def test_the_file_in_the_docs_is_complete_and_says_the_defaults(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)
    (tmp_path / "t.toml").write_text(text)
    found, origins = resolve({}, {}, tmp_path / "t.toml")
    assert set(origins) == set(Config.__struct_fields__) - {"tokens", "tenants"}, (
        "a list that was begun here could not be added to"
    )
    plain = in_force(Config(), {})
    assert {name: value for name, (value, _) in in_force(found, origins).items()} == {
        name: value for name, (value, _) in plain.items()
    }
    leaves = {name for name in plain if name.startswith("defaults.")}
    assert {name for name, (_, origin) in in_force(found, origins).items() if origin != "default"} >= leaves


def test_example_and_tables_in_the_docs_are_those_of_the_program() -> None:
    page = settings_reference.PAGE.read_text("utf-8")
    assert settings_reference.written(page) == page, "run .venv/bin/python -m tests.harness.settings_reference"


def test_the_rights_in_the_docs_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| (.+?) \| (.*`(?:GET|POST|PUT).*) \|$", DOC, re.MULTILINE)
    said: dict[str, str] = {}
    for right, cell in rows:
        for method, path in re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (\S+)`", cell):
            said[f"{method} {path.replace('…', '/v1/topics/{topic}')}"] = right
    words = {
        ("open",): "none, not",
        ("token",): "any token",
        ("all",): "any token for topics `*`",
        RIGHTS: "any right",
        ("read", "consume", "operate", "admin"): "`read`, or `consume`, `operate`",
        ("read", "operate", "admin"): "`read` or `operate` on topics `*`",
        ("produce", "admin"): "`produce`",
        ("produce", "operate", "admin"): "`produce`, or `operate`",
        ("consume", "admin"): "`consume`",
        ("consume", "operate", "admin"): "`consume`, or `operate`",
        ("operate", "admin"): "`operate`",
        ("admin",): "`admin`",
    }
    assert set(said) == set(ACCESS)
    for route, needed in ACCESS.items():
        assert said[route].startswith(words[needed]), route


@pytest.mark.parametrize("text", ["", "8900", ":8900", "host:", "host:99999", "host:-1", "a:b:1", "host:1x"])
def test_an_address_has_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(text) + "$"):
        parse_address(text)


def test_a_secret_is_long_enough_and_readable(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_secret(str(file))
    for bad in (b"", b"short\n", b"x" * 5_000):
        file.write_bytes(bad)
        with pytest.raises(InvalidArgument, match="16 to 4096 make a secret"):
            read_secret(str(file))
    file.write_bytes(b" sixteen bytes ok\n")
    assert read_secret(str(file)) == b"sixteen bytes ok"


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_secret_that_other_users_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"sixteen bytes ok")
    file.chmod(mode)
    config = load({}, {}, None)
    identity = identity_of(structs.replace(config, cluster=structs.replace(config.cluster, secret_file=str(file))))
    assert identity.secret == b"sixteen bytes ok"
    found = [(record.getMessage(), *list(record.__dict__["fields"].values())[:2]) for record in caplog.records]
    assert found == [("secret_not_private", str(file), f"{mode:04o}")] * warns
