"""Messages about packages that an interpreter does not have. Python 3.8 and later, standard library."""

from __future__ import annotations

import shlex
import socket
import sys

# Packages on PyPI by the module that they install, where the names differ.
PACKAGES = {
    "ale_py": "ale-py",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "mujoco_py": "mujoco-py",
    "Box2D": "box2d-py",
    "dm_control": "dm-control",
    "shimmy": "shimmy[dm-control]",
    "pkg_resources": "setuptools<81",  # which later ones lack
}


def on_this_machine() -> str:
    """The machine, as a part of a sentence."""
    return f" on {socket.gethostname()}"


def package_of(module: str) -> str:
    """The package that has this module, as far as that is known: by its name."""
    top = module.partition(".")[0]
    return PACKAGES.get(top, top)


def install(program: str, package: str, *options: str) -> str:
    """The command that installs a package for this interpreter."""
    return f"{shlex.quote(program)} -m pip install {' '.join([*options, shlex.quote(package)])}"


def remedy(error: ImportError) -> str:
    """Name the machine that lacks a module, and the command to run there, to follow the text of the error."""
    python = f"{sys.executable} (Python {sys.version.split()[0]}){on_this_machine()}"
    if not error.name:
        return f", in {python}"
    return f", in {python}; run: {install(sys.executable, package_of(error.name))}, or name the folder that has it"
