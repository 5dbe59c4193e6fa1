"""The data folders behind a path: one, or one for each shard of a server with several. A topic is in one of them, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turtlemq.backup import check_format
from turtlemq.shard_folders import data_folders
from turtlemq.shards import shard_of
from turtlemq.storage import names
from turtlemq.storage.door import Door


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

    def folder_of(self, topic: str) -> Path:
        """The data folder with this topic."""
        return self.folders[0] if len(self.folders) == 1 else self.folders[shard_of(topic, len(self.folders))]

    def topic_folder(self, topic: str) -> Path:
        """The folder of this topic."""
        return self.folder_of(topic) / names.TOPICS / topic

    def topics(self) -> list[str]:
        """All topics, sorted."""
        found = [folder / names.TOPICS for folder in self.folders]
        entries = [path for folder in found if folder.is_dir() for path in folder.iterdir()]
        return sorted(path.name for path in entries if names.is_topic(path.name) and path.is_dir())
