"""README and docs are true: every block runs or says why not, shown output is the real output, links lead somewhere, and the
pages about verbs, routes and settings name all of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.harness import cli_reference, module_map
from tests.harness.doc_pages import DATA, RUN, Block, Reader, blocks, commands, malformed, matches, pages
from tests.harness.server_process import ROOT

SKIPS_MAX = 8  # blocks that no test runs, in all pages together
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def runnable() -> list[Path]:
    return [page for page in pages() if any(b.language in RUN and not b.skip for b in blocks(page.read_text("utf-8")))]


@pytest.mark.slow
@pytest.mark.parametrize("page", runnable(), ids=name)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.fail("curl is needed to run the docs: apt-get install curl")
    assert Reader(tmp_path).read(page) > 0


def test_every_block_is_run_or_says_why_not() -> None:
    found = [(page, block) for page in pages() for block in blocks(page.read_text("utf-8"))]
    wrong = [
        f"{name(page)}:{b.line}: a block of no known language: {b.language!r}"
        for page, b in found
        if b.language not in RUN + DATA
    ]
    wrong += [f"{name(page)}:{b.line}: {said}" for page, b in found if (said := malformed(b))]
    skipped = [f"{name(page)}:{b.line}: {b.skip}" for page, b in found if b.skip]
    wrong += [line for line in skipped if len(line.partition(": ")[2]) < 15]
    assert not wrong, "\n".join(wrong)
    elsewhere = [line for line in skipped if "run by tests/" in line]
    assert all((ROOT / line.partition("run by ")[2]).exists() for line in elsewhere), "\n".join(elsewhere)
    assert len(skipped) - len(elsewhere) <= SKIPS_MAX, "\n".join(skipped)


def test_targets_of_make_that_pages_name_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in pages():
        text = page.read_text("utf-8")
        named = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE) + re.findall(r"`make ([a-z-]+)`", text)
        assert set(named) <= targets, name(page)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them.

    >>> sorted(anchors("# What if…?\\n## `put` and `ack`"))
    ['put-and-ack', 'what-if']
    """
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in _HEADING.findall(plain)}


@pytest.mark.parametrize("page", pages(), ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in _LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), (name(page), target)
        assert not anchor or anchor in anchors(other.read_text("utf-8")), (name(page), target)


def test_the_index_of_docs_names_every_page() -> None:
    text = (ROOT / "docs/README.md").read_text("utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in text, page.name


def test_cli_md_has_every_verb_and_option() -> None:
    page = cli_reference.PAGE.read_text("utf-8")
    assert cli_reference.written(page) == page, (
        "docs/CLI.md is behind the program: run .venv/bin/python -m tests.harness.cli_reference"
    )
    prose = page.partition(cli_reference.BEGIN)[0]
    for full, command in cli_reference.verbs():
        assert f"`{full.split()[-1]}`" in prose or full in prose, f"docs/CLI.md has no word about {full}"
        assert command.help or full == "turtlemq topics", full


def test_every_verb_shows_an_example_in_its_help() -> None:
    for full, command in cli_reference.verbs():
        if not hasattr(command, "commands") and full not in ("turtlemq serve", "turtlemq config", "turtlemq topics list"):
            assert f"{full} " in command.help, full


@pytest.mark.parametrize("page", pages(), ids=name)
def test_verbs_and_options_named_in_a_sentence_are_there(page: Path) -> None:
    known = dict(cli_reference.verbs())
    for words in map(str.split, re.findall(r"`turtlemq ([a-z][^`]*)`", page.read_text("utf-8"))):
        verb = max((full for full in known if f"turtlemq {' '.join(words)} ".startswith(f"{full} ")), key=len, default=None)
        assert verb is not None or words == ["report"], f"{name(page)}: turtlemq {' '.join(words)}"
        if verb is not None:
            there = {option for parameter in known[verb].params for option in parameter.opts} | {"--help"}
            assert {word for word in words if word.startswith("--")} <= there, f"{name(page)}: turtlemq {' '.join(words)}"


def test_http_md_names_every_route() -> None:
    from turtlemq.server.operations import OPERATIONS

    text = "".join((ROOT / "docs" / page).read_text("utf-8") for page in ("HTTP.md", "OBSERVE.md", "README.md"))
    for route in OPERATIONS:
        if route.path == "/pages/{file}":
            continue  # the sources of the pages
        last = route.path.replace("/v1/topics/{topic}", "…").replace("…/groups/{group}", "…")
        last = last.removesuffix("/{id}")
        assert last.removeprefix("…") in text, route.path


def test_the_files_shown_in_operations_md_are_those_in_deploy() -> None:
    shown = {block.language: block.text for block in blocks((ROOT / "docs/OPERATIONS.md").read_text("utf-8"))}
    assert shown["ini"] == (ROOT / "deploy/turtlemq.service").read_text("utf-8")
    assert shown["dockerfile"] == (ROOT / "deploy/Dockerfile").read_text("utf-8")


# The reader can fail


def test_output_is_compared() -> None:
    assert matches(["t… 5"], "t123 5\n")
    assert matches(["a", "…"], "a\n")
    assert not matches(["a", "…", "b"], "a\nc\n")
    assert not matches([], "something\n")
    assert not matches(["a.c"], "abc\n")


def test_blocks_are_found_with_line_language_and_reason() -> None:
    text = "# T\n\n```sh\nls\n```\n\n- x\n\n  ```console\n  $ ls\n  a\n  ```\n\n```sh skip: no way here\nboom\n```\n"
    text += "\n```\nbare\n```\n"
    assert blocks(text) == [
        Block(3, "sh", "", "ls\n"),
        Block(9, "console", "", "$ ls\na\n"),
        Block(14, "sh", "no way here", "boom\n"),
        Block(18, "", "", "bare\n"),
    ]
    assert [list(commands(block)) for block in blocks(text)[:2]] == [[("ls", None)], [("ls", ["a"])]]
    assert malformed(Block(1, "json", "", "{")) is not None
    assert malformed(Block(1, "toml", "", "a = ")) is not None


def test_a_page_that_lies_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "LIE.md"
    page.write_text("```console\n$ turtlemq put t 1 --id a\nb\n```\n")
    with pytest.raises(AssertionError, match=r"LIE\.md:1"):
        Reader(tmp_path).read(page)


def test_architecture_md_has_the_current_modules() -> None:
    page = module_map.PAGE.read_text("utf-8")
    assert module_map.written(page) == page, "docs/ARCHITECTURE.md is behind the tree: run python -m tests.harness.module_map"
    long = [line for line in page.splitlines() if line.startswith("| `") and len(line) > module_map.SENTENCE_CHARS_MAX]
    assert long == [], "a module's first sentence fits into a table"


def test_architecture_md_names_modules_that_exist() -> None:
    walk = module_map.PAGE.read_text("utf-8").partition("## The walk of one message")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:server|handlers|incoming|outgoing|topic|index|broker|segment|storage)\.[a-z_]+)`", walk))
    homes = {"handlers": "server/handlers", "incoming": "server/incoming", "outgoing": "server/outgoing"}
    assert len(named) > 10
    for package, module in (name.split(".") for name in named):
        assert (ROOT / "turtlemq" / homes.get(package, package) / f"{module}.py").exists(), f"{package}.{module}"
