"""The table of optional fields: its rows are sound, clients know them, and a field that is added to a copy of the table reaches
every place that stores, copies or shows a message, without an edit of any other file."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tests.harness.added_fields import FOR_CONSUMERS, VALUES
from tests.harness.codec import decode_batch
from tests.harness.server_process import ROOT
from turtlemq.client import NewMessage
from turtlemq.client.outgoing import MessageFields, outgoing_message, produce_request
from turtlemq.message_fields import FIELDS, NAMES, Kind, OptionalColumns, StoredFields
from turtlemq.model import Priority
from turtlemq.segment import format as f
from turtlemq.server.incoming.batches import DueRules
from turtlemq.server.incoming.bson_messages import BsonMessage
from turtlemq.server.media_types import BSON, JSON

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
STEPS = (
    "put one, JSON; put many, JSON; put lines, NDJSON; put many, BSON; put numbers alone, BSON; put; reschedule; edit the body; "
    "seal; compaction; fetch, JSON; short back-off, BSON; long back-off, listing; long back-off, JSON; dead letter; "
    "dead letter, listing; requeue, view; requeue, JSON; restored, a; restored, asleep; restored, waiting; restored, dead; "
    "restored, ready; OpenAPI; OpenAPI, consumers"
).split("; ")
SPARK_STEPS = "Spark, delay, asleep; Spark, delay, waiting; Spark, ready, ready; Spark, dead, dead".split("; ")
TO_CONSUMERS = {step for step in STEPS if step.startswith(("fetch", "short", "requeue, J", "long back-off, J"))}
TO_CONSUMERS |= {"dead letter", "OpenAPI, consumers"}

NOW = 1_790_000_000_000


# A field more


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.harness.added_fields", str(tmp_path_factory.mktemp("fields"))]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'spark'}"}
    run = subprocess.run([*command, *(["spark"] if HAS_ARROW else [])], cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("step", STEPS)
def test_an_added_field_arrives(seen: dict[str, dict[str, Any]], step: str) -> None:
    expected = FOR_CONSUMERS if step in TO_CONSUMERS else VALUES
    if "numbers alone" in step:
        expected = {name: value for name, value in VALUES.items() if not isinstance(value, dict)}
    if step == "requeue, JSON":  # a requeued message does not expire
        expected = expected | {"expires_ms": None}
    assert seen[step] == expected


@pytest.mark.skipif(
    not HAS_ARROW, reason="not run: Spark's packages are not installed; `make test` installs them, then runs this"
)
@pytest.mark.parametrize("step", SPARK_STEPS)
def test_an_added_field_has_a_column_in_spark(seen: dict[str, dict[str, Any]], step: str) -> None:
    assert seen[step] == VALUES


def test_the_walk_has_these_steps_and_no_others(seen: dict[str, dict[str, Any]]) -> None:
    assert list(seen) == [*STEPS, *(SPARK_STEPS if HAS_ARROW else [])]


# The rows


def test_each_row_has_a_flag_and_an_element_of_its_own() -> None:
    others = [flag for name, flag in vars(f).items() if name.isupper() and name in FLAG_NAMES]
    flags = [row.flag for row in FIELDS]
    assert len({*flags, *others}) == len(flags) + len(others)
    assert all(flag.bit_count() == 1 for flag in flags)
    assert len({row.element for row in FIELDS}) == len(FIELDS)
    assert all(len(row.element.encode()) < f.NAME_BYTES_MAX for row in FIELDS), "or a scan would not accept the document"
    assert {row.kind.value for row in FIELDS} <= set(f.VARIABLE_TYPES)


FLAG_NAMES = "PRIORITY JSON CONTINUES BARRIER TOMBSTONE REPLACES SERVER_ID MOVED HANDOFF META NOTICE SUPERSEDES".split()


def test_values_columns_and_stored_values_have_the_same_fields() -> None:
    assert tuple(field.name for field in dataclasses.fields(OptionalColumns)) == NAMES
    assert tuple(field.name for field in dataclasses.fields(StoredFields)) == NAMES


def test_times_end_in_ms_and_their_elements_do_not() -> None:
    for row in FIELDS:
        assert row.name == (f"{row.element}_ms" if row.kind is Kind.TIME else row.element)


# Clients


def test_every_put_takes_the_fields_that_the_server_knows() -> None:
    keywords = [*MessageFields.__annotations__]
    times = {row.element for row in FIELDS if row.kind is Kind.TIME} | {"due"}
    wire = {f"{name}_ms" if name in times else name for name in keywords}
    assert wire == {field.name for field in msgspec.structs.fields(BsonMessage)} - {
        "id",
        "body",
        "due",
    }  # `due` is `due_ms` for people
    assert [field.name for field in dataclasses.fields(NewMessage)] == ["body", "id", *keywords]
    assert [*inspect.signature(outgoing_message).parameters] == ["body", "id_", *keywords, "put_s"]


def test_both_encodings_of_a_client_carry_every_field() -> None:
    fields: dict[str, Any] = {
        "ttr": 5.0,
        "priority": "high",
        "expires": NOW + 9_000,
        "headers": {"a": "b"},
        "if_exists": "replace",
        "spread": 3.0,
    }
    for when in ({"delay": 2.0}, {"due": NOW + 2_000}):
        assert fields.keys() | when.keys() | {"delay", "due"} == MessageFields.__annotations__.keys()
        for body, kind in ((1, JSON), (b"1", BSON)):
            request = produce_request("t", [outgoing_message(body, "id", **fields, **when)], 0.0)
            assert request.content_type == kind
            batch = decode_batch(request.body or b"", kind, NOW, DueRules())
            assert (batch.ids, batch.due_ms, batch.ttr_ms, batch.spread_ms) == (["id"], [NOW + 2_000], [5_000], [3_000])
            assert batch.flags == [Priority.HIGH | (f.JSON if kind == JSON else 0)]
            assert [getattr(batch, name) for name in NAMES] == [[NOW + 9_000], [{"a": "b"}]]
