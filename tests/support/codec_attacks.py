"""Values that no decoder may accept, each under the name of what is wrong with it."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import msgpack
import numpy as np
from support.codec_values import extension, packed

from envhub.values import codec


def array(
    type: Any = "<f8", shape: Any = (1,), data: bytes = bytes(8), code: int = codec.ARRAY, **others: Any
) -> bytes:
    """An array whose head has these entries; None leaves one out."""
    fields = {"nd": True, "type": type, "kind": b"", "shape": shape, **others}
    head = packed({name.encode(): value for name, value in fields.items() if value is not None})
    return packed(msgpack.ExtType(code, bytes([len(head)]) + head + data))


class Bomb:
    def __reduce__(self) -> Any:
        return sys.exit, ("unpickled",)


PICKLED = pickle.dumps(Bomb())
HEAD = packed({b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [1]})
ATTACKS = {
    "pickle as the data of an array of objects": array("|O", data=PICKLED),
    "pickle in an object array": array("|O", data=PICKLED, kind=b"O"),
    "pickle in an array of honest bytes": array("|u1", [len(PICKLED)], PICKLED, kind=b"O"),
    "structure of an honest type": array(kind=b"V"),
    "no type": array(None),
    "no shape": array(shape=None),
    "shape is a number": array(shape=1),
    "nd is neither": array(nd="yes"),
    "nd is false": array(nd=False),
    "unknown entry": array(more=1),
    "pointers as objects": array("|O"),
    "pointers, short name": array("O"),
    "pointers in pairs": array("O,O", data=bytes(16)),
    "pointers in a list": array([["a", "|O"]]),
    "pointers in a dict of fields": array({"names": ["a"], "formats": ["O"]}),
    "pointers in a structure with text": array("U1,O", data=bytes(12)),
    "scalar pointer": array("|O", [], code=codec.SCALAR),
    "structure": array([["a", "<f8"]]),
    "structure, short name": array("f,f"),
    "sub-array type": array("(2)f"),
    "long double complex": array("<c32", data=bytes(32)),
    "void": array("|V8"),
    "void of nothing, huge shape": array("|V0", [1 << 40], b""),
    "text of nothing, huge shape": array("|S0", [1 << 40], b""),
    "characters of nothing, huge shape": array("<U0", [1 << 40], b""),
    "text with a bad code point": array("<U1", data=b"\xff\xff\xff\xff"),
    "text with a bad code point, swapped": array(">U1", data=b"\x00\x11\x00\x00"),
    "text with a long name": array("<U1" + " " * 30, data=bytes(4)),
    "text of a wrong length": array("<U1", [2], bytes(4)),
    "time of a negative shape": array("<M8[s]", [-1]),
    "type is bytes": array(b"<f8"),
    "type is nonsense": array("zz"),
    "type is a list": array(["<f8"]),
    "type is a number": array(8),
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
    "text in a shape": array(shape=["1"]),
    "nil in a shape": array(shape=[None]),
    "list in a shape": array(shape=[[1]]),
    "too many dimensions": array(shape=[1] * 17),
    "scalar with a dimension": array(code=codec.SCALAR),
    "scalar of two": array(shape=[], data=bytes(16), code=codec.SCALAR),
    "scalar of a short time": array("<M8[s]", [], b"short", codec.SCALAR),
    "array of nothing": packed(msgpack.ExtType(codec.ARRAY, b"")),
    "head of nothing": packed(msgpack.ExtType(codec.ARRAY, b"\0" + bytes(8))),
    "head that ends early": packed(msgpack.ExtType(codec.ARRAY, bytes([len(HEAD) - 1]) + HEAD + bytes(8))),
    "head that ends late": packed(msgpack.ExtType(codec.ARRAY, bytes([len(HEAD) + 1]) + HEAD + bytes(8))),
    "head beyond the array": packed(msgpack.ExtType(codec.ARRAY, b"\xff" + HEAD + bytes(8))),
    "head of no entries": packed(msgpack.ExtType(codec.ARRAY, b"\1\x80" + bytes(8))),
    "head that is a list": packed(msgpack.ExtType(codec.ARRAY, b"\6\x92\xa3<f8\x01" + bytes(8))),
    "head that is a text": packed(msgpack.ExtType(codec.ARRAY, b"\4\xa3<f8" + bytes(8))),
    "head that is a map": packed(msgpack.ExtType(codec.ARRAY, b"\6\x81\x00\xa3<f8" + bytes(8))),
    "array as a map": packed({b"nd": True, b"type": "<f8", b"kind": b"", b"shape": [1], b"data": bytes(8)}),
    "map with bytes keys": packed({b"a": 1}),
    "map with numbers for keys": packed({1: 1}),
    "map with nil for a key": b"\x81\xc0\x01",
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
