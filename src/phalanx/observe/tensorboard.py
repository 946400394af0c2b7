"""Write an event file for TensorBoard without its package: TFRecords that each hold an Event message. The field numbers
are those of event.proto and summary.proto: Event(wall_time 1, step 2, file_version 3, summary 5), Value(tag 1,
simple_value 2)."""

from __future__ import annotations

import struct
from typing import Any


def event_file(rows: list[dict[str, Any]]) -> bytes:
    """Encode the numbers of each row as scalars of its step."""
    out = [_tfrecord(_double(1, rows[0]["time"] if rows else 0.0) + _bytes(3, b"brain.Event:2"))]
    for row in rows:
        scalars = {name: value for name, value in row.items() if isinstance(value, float) and name != "time"}
        values = b"".join(_bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in scalars.items())
        out.append(_tfrecord(_double(1, row["time"]) + _varint(2 << 3) + _varint(row["step"]) + _bytes(5, values)))
    return b"".join(out)


def _tfrecord(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    """Return the CRC-32C, masked as TFRecord requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(value)
    return table


_CRC = _crc_table()


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value
