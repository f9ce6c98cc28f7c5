"""Minari's storage of single episodes before they are part of a data set. Known to work with Minari 0.5.4."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from minari.dataset._storages import get_minari_storage
from pyarrow.dataset import IpcFileFormat, IpcFileWriteOptions

_ArrowStorage: Any = get_minari_storage("arrow")


class _Compressed(IpcFileFormat):  # type: ignore[misc]
    """Arrow's files, whose columns are compressed by zstd; Arrow's readers find that out by themselves.

    An episode of Atari frames has less than a hundredth of its bytes, and is written in a third to a tenth of the time.
    Numbers that look random stay as large, and take about as long.
    """

    def make_write_options(self, **options: Any) -> IpcFileWriteOptions:
        """As of ``IpcFileFormat``; compressed unless ``options`` say otherwise."""
        return super().make_write_options(**{"compression": "zstd", **options})


class StagingStorage(_ArrowStorage):  # type: ignore[misc]
    """Writes each episode into a folder of its own, by Minari's own code, and keeps no account of all of them.

    Attributes:
        about: what is said of the next episode, besides what Minari says.
    """

    FORMAT = _Compressed()  # Minari hands it on to ``pyarrow.dataset.write_dataset``
    total_steps = total_episodes = 0
    about: dict[str, Any]

    def update_episode_metadata(self, metadatas: Iterable[Any], episode_indices: Iterable[int] | None = None) -> None:
        """Write what is said of the episodes, in one go."""
        for metadata, number in zip(metadatas, episode_indices or (), strict=True):
            text = json.dumps({**metadata, **self.about})
            self.data_path.joinpath(str(number), "metadata.json").write_text(text, encoding="utf-8")

    def update_metadata(self, metadata: Any) -> None:
        """Nothing is said of all episodes here."""

    def get_size(self) -> float:
        """Nothing, for the data set has the size."""
        return 0.0
