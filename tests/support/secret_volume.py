"""A folder as Kubernetes' kubelet fills it from a Secret or a ConfigMap: its links, owners and modes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path


def write_volume(folder: Path, files: Mapping[str, str], group: int, mode: int) -> None:
    """Put the files into the folder, in place of those of an earlier call, in one step for a reader.

    ``..data`` leads to a folder of this version, and a link of each file's name leads into ``..data``. All belong to
    root and to ``group``, the pod's ``fsGroup``, which may read them whatever ``mode`` says.
    """
    folder.mkdir(exist_ok=True)
    old = [*folder.glob("..2*")]
    version = folder / f"..2026_11_28.{time.time_ns()}"
    version.mkdir()
    for name, text in files.items():
        (version / name).write_text(text)
        (version / name).chmod(mode | 0o440)
    for each in (*version.iterdir(), version, folder):
        os.chown(each, 0, group)
    version.chmod(0o2755)
    folder.chmod(0o3777)  # the sticky bit is the tmpfs's, the set-group-ID bit is fsGroup's
    before = {each.name for each in folder.iterdir() if each.is_symlink() and each.name != "..data"}
    for name in {*files} - before:
        _link(folder / name, Path("..data") / name, group)
    _link(folder / "..data.new", Path(version.name), group)
    os.rename(folder / "..data.new", folder / "..data")
    for name in before - {*files}:
        (folder / name).unlink()
    for each in old:
        shutil.rmtree(each)


def _link(path: Path, target: Path, group: int) -> None:
    path.symlink_to(target)
    os.lchown(path, 0, group)
