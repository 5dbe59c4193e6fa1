"""Length-prefixed messages of gRPC: the bytes of a stream are cut into messages, and messages get their prefixes. Pure.

>>> MessageReader().feed(frame([b"a", b"bc"]))
[b'a', b'bc']
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

MESSAGE_BYTES_MAX = 16 << 20  # of one message, unpacked
PREFIX_BYTES = 5  # a flag, and the length as a 32-bit number


class BadMessage(Exception):
    """The bytes of a stream are no gRPC messages. `too_large`: a message is over its limit."""

    def __init__(self, text: str, too_large: bool = False) -> None:
        super().__init__(text)
        self.too_large = too_large


class Packed(bytes):
    """A message that is still compressed with gzip: unpacking waits until a handler takes it."""


class MessageReader:
    """Cuts the bytes of one stream into messages. Holds at most one message that is not complete."""

    def __init__(self, packed: bool = False, most: int = MESSAGE_BYTES_MAX) -> None:
        self._buffer, self._packed, self._most = bytearray(), packed, most

    @property
    def held(self) -> int:
        """Bytes of a message that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete, in order. Raises `BadMessage`."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < PREFIX_BYTES + self._expected():
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        out, at, end = list[bytes](), 0, len(data)
        while end - at >= PREFIX_BYTES:
            begin = at + PREFIX_BYTES
            length = self._checked(data[at], int.from_bytes(data[at + 1 : begin], "big"))
            if begin + length > end:
                break
            message = data[begin : begin + length]
            out.append(Packed(message) if data[at] else message)
            at = begin + length
        self._buffer += data[at:]
        return out

    def _expected(self) -> int:
        """The length of the message that is not complete, as far as its prefix tells."""
        if len(self._buffer) < PREFIX_BYTES:
            return 0
        return self._checked(self._buffer[0], int.from_bytes(self._buffer[1:PREFIX_BYTES], "big"))

    def _checked(self, flag: int, length: int) -> int:
        if flag > 1 or (flag and not self._packed):
            raise BadMessage("a message is compressed, and its call names no compression that is known here: identity or gzip")
        if length > self._most:
            raise BadMessage(f"a message has at most {self._most:,} bytes, this one {length:,}", too_large=True)
        return length


def unpacked(message: Packed, most: int = MESSAGE_BYTES_MAX) -> bytes:
    """A message without its compression. Raises `BadMessage` if it is no gzip, or larger than `most`."""
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        out = unpacker.decompress(message, most)
    except zlib.error as error:
        raise BadMessage(f"a message is not compressed with gzip, as its call says: {error}") from None
    if unpacker.unconsumed_tail:
        raise BadMessage(f"a message has at most {most:,} bytes, this one more when it is unpacked", too_large=True)
    if not unpacker.eof:
        raise BadMessage("a compressed message is cut off")
    return out


def frame(messages: Iterable[bytes]) -> bytes:
    """Messages with their prefixes, one behind the other, not compressed."""
    return b"".join([part for message in messages for part in (b"\0" + len(message).to_bytes(4, "big"), message)])
