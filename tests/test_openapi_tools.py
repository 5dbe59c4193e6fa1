"""The OpenAPI document as other tools read it: two validators, Redocly, and generators of clients, one of which is then used."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.harness.server_process import Server, environment, running
from tests.harness.tools import NODE_MODULES, generator, program, run
from turtlemq.server.openapi import document

CALLER = """
import { Configuration, ConsumeApi, ProduceApi, ResponseError } from "./typescript-fetch/index.js";

const configuration = new Configuration({ basePath: process.env.TURTLEMQ_URL });
const [producer, consumer] = [new ProduceApi(configuration), new ConsumeApi(configuration)];
const stored = await producer.produce({ topic: "generated", produceRequest: { messages: [{ id: "one", body: { close: 17 } }] } });
const { messages, lease } = await consumer.fetch({ topic: "generated", fetch: { wait: 10, max: 5, ttr: 30 } });
const extended = await consumer.extend({ topic: "generated", extend: { ids: ["one"], ttr: 60, lease } });
const acked = await consumer.ack({ topic: "generated", ackRequest: { acks: ["one"], lease } });
const missing = producer.getMessage({ topic: "generated", id: "two" });
const refused = await missing.catch((error: ResponseError) => error.response.status);
console.log(JSON.stringify([stored.created, messages[0].body, extended.extended, acked.acked, refused]));
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("openapi") / "openapi.json"
    path.write_text(json.dumps(document()))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("generated") / "data") as found:
        yield found


def test_openapi_spec_validator_accepts_it() -> None:
    OpenAPIV31SpecValidator(document()).validate()
    broken = document()
    broken["paths"]["/v1/topics"]["get"]["responses"]["200"].pop("description")
    assert not OpenAPIV31SpecValidator(broken).is_valid()


@pytest.mark.slow
def test_redocly_finds_nothing_wrong(file: Path) -> None:
    said = run(program("redocly"), "lint", file, env=environment(CI="1", REDOCLY_TELEMETRY="off", NO_COLOR="1"))
    assert "Your API description is valid" in said
    assert "warning" not in said.replace("Deprecation warning", "")


@pytest.fixture(scope="module")
def clients(file: Path) -> Path:
    """A folder with clients of three languages, made by one run of the generator."""
    for language in ("go", "java", "typescript-fetch"):
        made: dict[str, Any] = {"generatorName": language, "inputSpec": str(file), "outputDir": str(file.parent / language)}
        made |= {"additionalProperties": {"importFileExtension": ".js"}} if language == "typescript-fetch" else {}
        (file.parent / f"{language}.yaml").write_text(json.dumps(made))
    run(*generator(), "batch", *file.parent.glob("*.yaml"))
    return file.parent


@pytest.mark.slow
def test_openapi_generator_finds_nothing_wrong(file: Path) -> None:
    said = run(*generator(), "validate", "-i", file)
    assert re.findall(r"^\t- (.*)$", said, re.MULTILINE) == ["Unused model: BsonMessage"]  # it knows no contentSchema


@pytest.mark.slow
def test_generated_models_have_the_names_of_schemas(clients: Path) -> None:
    models = {path.stem for path in (clients / "java" / "src" / "main").rglob("model/*.java")} - {"AbstractOpenApiSchema"}
    schemas = set(document()["components"]["schemas"])
    assert models - schemas == {
        "AckLease",
        "AckRequest",
        "ExtendLease",
        "GroupStartStart",
        "JsonMessageDelay",
        "MoveAdvance",
        "NewScheduleDelaysInner",
        "NewScheduleEvery",
        "NewScheduleJitter",
        "ProduceRequest",
    }
    assert schemas <= models, "no schema got another name"


@pytest.mark.slow
def test_a_generated_client_in_go_compiles_with_wide_numbers(clients: Path) -> None:
    env = environment(GOCACHE=str(clients / "cache"), GOFLAGS="-buildvcs=false", GOPROXY="off", GOTOOLCHAIN="local")
    run(program("go"), "build", ".", cwd=clients / "go", env=env)
    models = "".join(path.read_text() for path in (clients / "go").glob("model_*.go"))
    assert "int64" in models
    assert not re.search(r"\b(int32|float32)\b", models)


@pytest.mark.slow
def test_a_generated_client_in_typescript_works(clients: Path, server: Server) -> None:
    node, tsc = program("node"), program("tsc")
    (clients / "package.json").write_text('{"type": "module"}')
    (clients / "caller.ts").write_text(CALLER)
    options = ["--strict", "--target", "es2022", "--module", "nodenext", "--typeRoots", str(NODE_MODULES / "@types")]
    run(tsc, *options, "--types", "node", "caller.ts", cwd=clients)
    said = run(node, clients / "caller.js", env=environment(TURTLEMQ_URL=server.url))
    assert json.loads(said) == [1, {"close": 17}, 1, 1, 404]
