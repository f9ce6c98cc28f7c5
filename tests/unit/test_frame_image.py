"""Frames for operators: how an observation becomes one, and its PNG."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from envhub_client.observer import Frame
from envhub_server.hub.operations import as_image
from PIL import Image

import envhub

NUMBERS = np.random.default_rng(0)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_png_has_the_pixels(channels: int, mode: str) -> None:
    pixels = NUMBERS.integers(0, 256, (5, 7, channels), np.uint8)
    image = Image.open(io.BytesIO(Frame(pixels, "render").png()))
    assert (image.mode, image.size) == (mode, (7, 5))
    assert np.array_equal(np.asarray(image).reshape(pixels.shape), pixels)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((84, 84), lambda stack: stack[:, :, None]),
        ((84, 84, 3), lambda stack: stack),
        ((3, 64, 48), lambda stack: np.moveaxis(stack, 0, 2)),
        ((4, 84, 84), lambda stack: stack[-1][:, :, None]),
        ((84, 84, 4), lambda stack: stack[:, :, -1:]),
        ((128,), lambda stack: None),
        ((2, 2, 64, 64), lambda stack: None),
        ((9, 9, 9), lambda stack: None),
    ],
)
def test_observation_that_looks_like_an_image_is_one(shape: tuple[int, ...], seen: Any) -> None:
    observation = NUMBERS.integers(0, 256, shape, np.uint8)
    expected = seen(observation)
    image = as_image(observation)
    assert (image is None) if expected is None else (image is not None and np.array_equal(image, expected))


@pytest.mark.parametrize(
    ("row", "frames"),
    [
        ({"source": "render"}, [b"123"]),
        ({"shape": [2, 2, 3], "source": "render"}, [b"123"]),
        ({"shape": [1, 1, 2], "source": "render"}, [b"12"]),
        ({"shape": [0, 0, 3], "source": "render"}, [b""]),
        ({"shape": [1, 1, 3], "source": "render"}, []),
        ({"shape": "no", "source": "render"}, [b"123"]),
    ],
)
def test_what_is_no_frame_is_a_breach(row: dict[str, Any], frames: list[bytes]) -> None:
    with pytest.raises(envhub.RemoteProtocolError, match="no frame"):
        Frame.of_row(row, frames)
