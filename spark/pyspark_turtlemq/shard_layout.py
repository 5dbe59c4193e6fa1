"""The data folders behind a path: one, or one for each shard of a server with several. A topic is in one of them, by its name.

A topic with partitions has a folder in each of several shards. Each of these folders has a name of its own here: that of the
topic where partition 0 is, `TOPIC@SHARD` elsewhere. Their rows are those of one topic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from turtlemq.backup import check_format
from turtlemq.errors import Unavailable
from turtlemq.replica import replica_file
from turtlemq.shard_folders import data_folders
from turtlemq.shards import shard_of
from turtlemq.storage import names
from turtlemq.storage.door import Door

SHARD_SIGN = "@"  # no topic has it


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The data folders of a server, by shard."""

    folders: tuple[Path, ...]

    @classmethod
    def of(cls, root: Path) -> ShardLayout:
        """The layout of a data folder. Raises `InvalidArgument` if it is being split or restored."""
        return cls(tuple(data_folders(Door(), root)))

    def check(self) -> None:
        """Raise `TurtleError` if a folder is no data folder, or of a newer format."""
        for folder in self.folders:
            check_format(Door(), folder)

    def check_complete(self) -> None:
        """Raise `Unavailable` if a folder is a copy in a cluster whose files are not those of one moment of its leader."""
        for folder in self.folders:
            facts = replica_file.read(Door(), folder)
            if facts is not None and not facts.complete:
                raise Unavailable(
                    f"{folder} is a copy that is not complete: it is being made equal to its leader's, or its disk has failed. "
                    "Read it when `turtlemq cluster status` shows its node in sync, or read another copy or a backup."
                )

    def topic_folder(self, name: str) -> Path:
        """The folder of this name."""
        topic, sign, shard = name.partition(SHARD_SIGN)
        return self.folders[int(shard) if sign else shard_of(topic, len(self.folders))] / names.TOPICS / topic

    def names_of(self, topics: Iterable[str]) -> list[str]:
        """The names of all folders of these topics."""
        found = []
        for topic in topics:
            home = shard_of(topic, len(self.folders))
            others = [shard for shard in range(len(self.folders)) if shard != home]
            here = [shard for shard in others if (self.folders[shard] / names.TOPICS / topic).is_dir()]
            found += [topic, *(f"{topic}{SHARD_SIGN}{shard:02}" for shard in here)]
        return found

    def topics(self) -> list[str]:
        """All topics, sorted."""
        found = [folder / names.TOPICS for folder in self.folders]
        entries = [path for folder in found if folder.is_dir() for path in folder.iterdir()]
        return sorted({path.name for path in entries if names.is_topic(path.name) and path.is_dir()})


def topic_of(name: str) -> str:
    """The topic of a folder's name.

    >>> topic_of("clicks@02"), topic_of("clicks")
    ('clicks', 'clicks')
    """
    return name.partition(SHARD_SIGN)[0]


def is_name(name: str) -> bool:
    """Whether a text is the name of a topic's folder."""
    topic, sign, shard = name.partition(SHARD_SIGN)
    return names.is_topic(topic) and (not sign or (len(shard) == 2 and shard.isascii() and shard.isdigit()))
