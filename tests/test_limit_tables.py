"""The tables of limits in the documents and the walks of the trust part `limits` name the same limits."""

from __future__ import annotations

import re

from tests.harness.server_process import ROOT
from tests.trust.limits import LIMITS
from tests.trust.limits_pairs import PAIRS

UNWALKED = {  # limits that other tests reach
    "bytes of requests under way": "tests/test_server_flow.py",
    "bytes that wait for a commit": "tests/test_server_flow.py",
    "retries in memory": "limits, failures × list",
    "files": "limits, topics × descriptors",
    "disk": "tests/test_full_disk.py",
    "tenants": "tests/test_tenants.py",
}


def documented(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = text.partition("<!-- limits -->")[2].partition("<!-- end of limits -->")[0]
    return [row for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) if row not in ("limit", "---")]


def test_every_documented_limit_is_walked_to() -> None:
    rows = [*documented("HTTP.md"), *documented("OPERATIONS.md")]
    assert len(rows) == len(set(rows)) > 25
    assert {limit.name for limit in LIMITS} | set(UNWALKED) == set(rows)
    assert [path for path in UNWALKED.values() if path.startswith("tests/") and not (ROOT / path).exists()] == []


def test_pairs_have_names_of_their_own() -> None:
    names = [limit.name for limit in (*LIMITS, *PAIRS)]
    assert len(names) == len(set(names))
