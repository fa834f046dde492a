"""Reads single features out of a serialized `tf.train.Example`, without TensorFlow and without touching the
rest.

A protocol buffer is a row of fields, each a tag, then a number or a length with that many bytes, so whatever
is not wanted is skipped: the labels of 50,000 pictures in a memory map are read in a third of a second, and
the pages that only hold pixels never leave the disk. https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator, Mapping
from typing import Any

Buffer = bytes | memoryview  # or an mmap: anything indexed by position

_LENGTH_DELIMITED = 2


def features(record: Buffer, start: int, end: int, wanted: Mapping[str, type]) -> dict[str, Any]:
    """Those features of the Example in record[start:end] that are `wanted`: name → type, `bytes` or `int`.

    Raises ValueError or IndexError where the bytes are no Example, or do not hold one value of each type wanted.
    """
    found = {}
    for _, first, last in _fields(record, start, end):  # Example.features
        for _, entry, entry_end in _fields(record, first, last):  # Features.feature, a map
            (_, key, key_end), (_, value, value_end) = _fields(record, entry, entry_end)
            name = bytes(record[key:key_end]).decode()
            if name in wanted:
                found[name] = _value(name, record, value, value_end, wanted[name])
    if len(found) < len(wanted):
        raise ValueError(f"it has no feature {min(wanted.keys() - found.keys())!r}")
    return found


def _value(name: str, record: Buffer, start: int, end: int, kind: type) -> bytes | int:
    # A Feature: bytes_list = 1, float_list = 2 or int64_list = 3.
    ((number, first, last),) = _fields(record, start, end)
    if (number, kind) == (1, bytes):
        ((_, first, last),) = _fields(record, first, last)
        return bytes(record[first:last])
    if (number, kind) == (3, int):
        tag, first = _varint(record, first)
        if tag & 7 == _LENGTH_DELIMITED:  # packed, as it always is in practice
            _, first = _varint(record, first)
        value, first = _varint(record, first)
        if first == last:
            return value - (value >> 63 << 64)  # two's complement
    raise ValueError(f"feature {name!r} is not one value of type {kind.__name__}")


def _fields(record: Buffer, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of each length-delimited field."""
    while start < end:
        tag, start = _varint(record, start)
        length, start = _varint(record, start)
        if tag & 7 != _LENGTH_DELIMITED or start + length > end:
            raise ValueError("it is not a tf.train.Example")
        yield tag >> 3, start, start + length
        start += length


def _varint(record: Buffer, start: int) -> tuple[int, int]:
    """A base-128 number and the position after it."""
    byte = record[start]
    if byte < 128:
        return byte, start + 1
    value, shift = byte & 127, 7
    while byte >= 128:
        if shift > 63:
            raise ValueError("it is not a tf.train.Example")
        start += 1
        byte = record[start]
        value |= (byte & 127) << shift
        shift += 7
    return value, start + 1
