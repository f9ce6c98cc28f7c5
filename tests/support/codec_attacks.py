"""Values that no decoder may accept, each under the name of what is wrong with it."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import msgpack
import numpy as np
from support.codec_values import extension, packed

from envhub.values import codec


def array(**fields: Any) -> bytes:
    """An array in the form of ``msgpack_numpy``, with some of its fields replaced; None leaves one out."""
    honest = {"nd": True, "type": "<f8", "kind": b"", "shape": [1], "data": bytes(8)}
    return packed({name.encode(): value for name, value in {**honest, **fields}.items() if value is not None})


class Bomb:
    def __reduce__(self) -> Any:
        return sys.exit, ("unpickled",)


PICKLED = pickle.dumps(Bomb())
TEXT = codec.ARRAY
ATTACKS = {
    "pickle in an object array": array(kind=b"O", type="|O", data=PICKLED),
    "pickle in an array of honest bytes": array(kind=b"O", type="|u1", shape=[len(PICKLED)], data=PICKLED),
    "structure of an honest type": array(kind=b"V"),
    "pickle under a text kind": array(kind="O", type="|O", data=PICKLED),
    "pointers as objects": array(type="|O"),
    "pointers as objects, no kind": array(type="|O", kind=None),
    "pointers, short name": array(type="O", kind=None),
    "pointers in pairs": array(type="O,O", kind=None, data=bytes(16)),
    "pointers in a list": array(type=[["a", "|O"]], kind=None),
    "pointers in a structure": array(type=[["a", "|O"]], kind=b"V"),
    "pointers in a dict of fields": array(type={"names": ["a"], "formats": ["O"]}, kind=None),
    "scalar pointer": array(nd=False, type="|O", shape=None),
    "structure": array(kind=b"V", type=[["a", "<f8"]]),
    "structure, short name": array(type="f,f"),
    "sub-array type": array(type="(2)f"),
    "long double complex": array(type="<c32", data=bytes(32)),
    "void": array(type="|V8"),
    "void of nothing, huge shape": array(type="|V0", shape=[1 << 40], data=b""),
    "text of nothing, huge shape": array(type="|S0", shape=[1 << 40], data=b""),
    "text as a plain array": array(type="<U2"),
    "text with a bad code point": array(type="<U1", data=b"\xff\xff\xff\xff"),
    "time as a plain array": array(type="<M8"),
    "type is bytes": array(type=b"<f8"),
    "type is nonsense": array(type="zz"),
    "type is a list": array(type=["<f8"]),
    "long type": array(type="float64"),
    "no type": array(type=None),
    "no data": array(data=None),
    "data is text": array(data="12345678"),
    "data too short": array(data=bytes(7)),
    "data too long": array(data=bytes(9)),
    "data empty": array(data=b""),
    "huge shape": array(shape=[1 << 40]),
    "shape beyond 64 bits": array(shape=[1 << 62, 1 << 62]),
    "nothing of a huge shape": array(shape=[0, 1 << 62], data=b""),
    "negative shape": array(shape=[-1]),
    "two negative shapes": array(shape=[-1, -1]),
    "true in a shape": array(shape=[True]),
    "float in a shape": array(shape=[1.0]),
    "shape is a number": array(shape=1),
    "shape is text": array(shape="1"),
    "shape is nil": packed({b"nd": True, b"type": "<f8", b"kind": b"", b"shape": None, b"data": bytes(8)}),
    "too many dimensions": array(shape=[1] * 17),
    "no shape": array(shape=None),
    "scalar with a shape": array(nd=False),
    "scalar of two": array(nd=False, shape=None, data=bytes(16)),
    "nd is neither": array(nd="yes"),
    "nd is a number": array(nd=1),
    "unknown key": array(more=1),
    "python complex of msgpack_numpy": packed({b"complex": True, b"data": "1j"}),
    "map with bytes keys": packed({b"a": 1}),
    "map with numbers for keys": packed({1: 1}),
    "map with nil for a key": b"\x81\xc0\x01",
    "pointers as an array extension": extension(TEXT, ["|O", [1], bytes(8)]),
    "numbers as an array extension": extension(TEXT, ["<f8", [1], bytes(8)]),
    "structure as an array extension": extension(TEXT, ["U1,O", [1], bytes(12)]),
    "array extension with a bad code point": extension(TEXT, ["<U1", [1], b"\xff\xff\xff\xff"]),
    "array extension with a bad code point, swapped": extension(TEXT, [">U1", [1], b"\x00\x11\x00\x00"]),
    "array extension of nothing": extension(TEXT, ["<U0", [1 << 40], b""]),
    "array extension with a long name": extension(TEXT, ["<U1" + " " * 30, [1], bytes(4)]),
    "array extension of a wrong length": extension(TEXT, ["<U1", [2], bytes(4)]),
    "array extension with a negative shape": extension(TEXT, ["<M8[s]", [-1], bytes(8)]),
    "array extension with two items": extension(TEXT, ["<U1", [1]]),
    "array extension whose name is a list": extension(TEXT, [["<U1"], [1], bytes(4)]),
    "tuple extension of a map": extension(codec.TUPLE, {"a": 1}),
    "set extension of lists": extension(codec.SET, [[1]]),
    "mapping extension with a list for a key": extension(codec.MAPPING, [[1], 2]),
    "mapping extension without its last value": extension(codec.MAPPING, [1, 2, 3]),
    "integer extension of words": packed(msgpack.ExtType(codec.INTEGER, b"ten")),
    "integer extension beyond ascii": packed(msgpack.ExtType(codec.INTEGER, b"\xff")),
    "complex extension too short": packed(msgpack.ExtType(codec.COMPLEX, bytes(8))),
    "complex extension too long": packed(msgpack.ExtType(codec.COMPLEX, bytes(32))),
    "repr extension that is no text": packed(msgpack.ExtType(codec.REPR, b"\xff")),
    "unknown generator": extension(codec.GENERATOR, ["RandomState", {}]),
    "generator by attribute": extension(codec.GENERATOR, ["Generator", {}]),
    "generator whose name is a list": extension(codec.GENERATOR, [["MT19937"], {}]),
    "generator without a state": extension(codec.GENERATOR, ["PCG64", {}]),
    "generator of a legacy state": extension(codec.GENERATOR, ["MT19937", ["MT19937", [0] * 624, 10**8]]),
    "pickle extension": packed(msgpack.ExtType(codec.PICKLE, PICKLED)),
    "pickle in a tuple in a list": packed(
        [msgpack.ExtType(codec.TUPLE, packed([msgpack.ExtType(codec.PICKLE, PICKLED)]))]
    ),
    "unknown extension": packed(msgpack.ExtType(99, b"")),
    "reserved byte": b"\xc1",
    "nothing": b"",
    "two values": b"\x01\x01",
    "cut short": codec.encode(np.arange(100))[:-1],
    "text that is no utf-8": b"\xa1\xff",
    "long list announced": b"\xdd\xff\xff\xff\xff",
    "long map announced": b"\xdf\xff\xff\xff\xff",
    "long text announced": b"\xdb\xff\xff\xff\xff",
    "long bytes announced": b"\xc6\xff\xff\xff\xff",
    "long extension announced": b"\xc9\xff\xff\xff\xff\x01",
    "lists two thousand deep": b"\x91" * 2000 + b"\x01",
    "many long lists": b"\xdd\x00\x0f\xff\xff" * 500,
}
