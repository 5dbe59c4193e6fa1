"""Pins are confined: names in a snapshot lead nowhere else, and the list of a session's pins is this user's own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.spark_session import need_packages

need_packages()

from pyspark_turtlemq import moments, pin_owners, pins  # noqa: E402 - only where pyarrow is
from pyspark_turtlemq.snapshot_files import LOGS, Vanished  # noqa: E402
from tests.harness.spark_data import NOW, messages, rows  # noqa: E402
from turtlemq.engine import Engine  # noqa: E402
from turtlemq.errors import Unavailable  # noqa: E402
from turtlemq.replica import replica_file  # noqa: E402
from turtlemq.storage.door import Door  # noqa: E402


@pytest.fixture
def root(tmp_path: Path) -> Path:
    engine = Engine.open(tmp_path / "data")
    engine.submit("t", messages(3), NOW)
    engine.close()
    return tmp_path / "data"


@pytest.mark.parametrize("name", ["../elsewhere", "..", ".", "", "/etc", "20261116T062922-0123456789ab/../x"])
def test_name_of_a_snapshot_leads_nowhere_else(root: Path, name: str) -> None:
    with pins.take_snapshot(root, ["t"], LOGS) as snapshot:
        assert snapshot.folder is not None
        shutil.copytree(snapshot.folder, root / "elsewhere")  # a whole snapshot, where none belongs
        with pytest.raises(Vanished, match="no snapshot"):
            pins.load_snapshot(root, name)


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a topic": lambda made: made["topics"].update({"../../t": made["topics"].pop("t")}),
    "a log": lambda made: made["topics"]["t"].update({"..": made["topics"]["t"].pop("delay")}),
    "a file": lambda made: made["topics"]["t"]["delay"].update({"../../../../../secret": 6}),
    "a file of another log": lambda made: made["topics"]["t"]["delay"].update({"ready_0000000000.bson": 6}),
    "a length": lambda made: made["topics"]["t"]["delay"].update({"delay_0000000000.bson": "all"}),
    "a list": lambda made: made.update({"topics": ["t"]}),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_names_in_a_manifest_are_not_believed(root: Path, forge: Callable[[dict[str, Any]], Any]) -> None:
    (root.parent / "secret").write_text("secret")
    with pins.take_snapshot(root, ["t"], LOGS) as snapshot:
        assert snapshot.folder is not None
        assert pins.load_snapshot(root, snapshot.name).topics["t"].segments("delay")
        path = snapshot.folder / pins.MANIFEST
        made = json.loads(path.read_text())
        forge(made)
        path.write_text(json.dumps(made))
        with pytest.raises(Vanished, match="no snapshot"):
            pins.load_snapshot(root, snapshot.name)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_list_of_a_session_is_in_a_folder_of_its_own(root: Path, temporary: Path) -> None:
    snapshot = pins.take_snapshot(root, ["t"], LOGS)
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    pin_owners.release_session(pin_owners.session_label())
    assert snapshot.folder is not None
    assert not snapshot.folder.exists()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("how", ["a link", "a file", "writable for all"])
def test_foreign_folder_for_lists_is_not_used(root: Path, temporary: Path, how: str) -> None:
    """Another user may have made it first: nothing is written there, nor read, and nothing is removed because of it."""
    folder, other = temporary / f"turtlemq-readers-{os.getuid()}", temporary / "other"
    other.mkdir()
    if how == "a link":
        folder.symlink_to(other)
    elif how == "a file":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    label = pin_owners.session_label()
    victim = pins.take_snapshot(root, ["t"], LOGS)
    assert victim.folder is not None
    if folder.is_dir():
        assert list(folder.iterdir()) == []
        (folder / "-".join(label.split()[1:])).write_text(f"{root}\n")
    pin_owners.release_session(label)
    assert victim.folder.exists()
    victim.release()


def test_only_snapshots_are_swept(root: Path) -> None:
    for name in ("notes", "20261116T062922-0123456789ab"):
        (root / pin_owners.FOLDER / name).mkdir(parents=True)
        (root / pin_owners.FOLDER / name / pin_owners.OWNER).write_text(f"{os.uname().nodename} 1 1")
        os.utime(root / pin_owners.FOLDER / name, (0, 0))
    assert len(rows(root)) == 3
    assert os.listdir(root / pin_owners.FOLDER) == ["notes"]


def mark(root: Path, complete: bool) -> None:
    replica_file.write(Door(), root, replica_file.ReplicaFacts("prod", 0, "r1", complete, 1))


def test_copy_that_is_not_complete_is_refused(root: Path) -> None:
    mark(root, complete=False)
    with pytest.raises(Unavailable, match="not complete"):
        rows(root)
    assert not (root / pin_owners.FOLDER).exists()
    mark(root, complete=True)
    assert len(rows(root)) == 3


def test_copy_that_is_replaced_while_it_is_pinned_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark(root, complete=True)
    pin_topic = moments.pin_topic

    def replaced(*arguments: Any) -> Any:
        mark(root, complete=False)
        return pin_topic(*arguments)

    monkeypatch.setattr(pins, "pin_topic", replaced)
    with pytest.raises(Unavailable, match="not complete"):
        pins.take_snapshot(root, ["t"], LOGS)
    assert not (root / pin_owners.FOLDER).exists()
