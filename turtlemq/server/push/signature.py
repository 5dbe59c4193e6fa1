"""Signatures of callbacks: the scheme of Standard Webhooks, which has verifiers in many languages. Pure.

`webhook-signature` is `v1,` and the Base64 of HMAC-SHA256 over `id.timestamp.body`. While a secret is changed, the signatures of
both secrets stand there, with a space between them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import quote

from turtlemq.errors import InvalidArgument

PREFIX = "whsec_"
SECRET_BYTES = 32  # of a new secret
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64  # as the scheme demands
_TOKEN = "!#$&'*+-^_`|~"  # characters of an HTTP field name beside letters and digits; "%" marks a replaced one
_TEXT = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # visible ASCII and the space, without "%"


def secret_of(random: bytes) -> str:
    """A secret made of random bytes.

    >>> secret_of(bytes(24))
    'whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA'
    """
    return PREFIX + base64.b64encode(random).decode()


def key_of(secret: str) -> bytes:
    """The bytes of a secret. Raises `InvalidArgument` for a text that is none."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if not secret.startswith(PREFIX) or not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise InvalidArgument(f"a secret is {PREFIX} and {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes as Base64")
    return key


def sign(secrets: Sequence[str], id_: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`, with one signature for each secret.

    >>> sign(["whsec_" + "A" * 32], "t:1", 1700000000, b"{}")
    'v1,nixxK/Hk5TuZ9XqVL9U72IemlZpJyfyXiPB8W/8Boh0='
    """
    signed = b"%s.%d.%s" % (id_.encode(), timestamp_s, body)
    digests = (hmac.digest(key_of(secret), signed, hashlib.sha256) for secret in secrets)
    return " ".join("v1," + base64.b64encode(digest).decode() for digest in digests)


def webhook_id(topic: str, id_: str) -> str:
    """The value of `webhook-id`: one for each message. The scheme signs it with dots around it, so it has none itself.

    >>> webhook_id("mail.de", "order 17.a"), webhook_id("t", "é")
    ('mail%2Ede:order%2017%2Ea', 't:%C3%A9')
    """
    return f"{_encoded(topic)}:{_encoded(id_)}"


def _encoded(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")


def header_fields(headers: Mapping[str, str]) -> dict[str, str]:
    """A message's own headers as fields of the request. Characters that a field cannot have are percent-encoded, in UTF-8: no
    header of a message can end its line and begin another field.

    >>> header_fields({"trace": "a b", "naïve key": "x\\r\\nhost: y%"})
    {'turtlemq-header-trace': 'a b', 'turtlemq-header-na%C3%AFve%20key': 'x%0D%0Ahost: y%25'}
    """
    return {f"turtlemq-header-{quote(name, safe=_TOKEN)}": field_value(value) for name, value in headers.items()}


def field_value(text: str) -> str:
    """A text as the value of a field."""
    return quote(text.strip(" "), safe=_TEXT)


def signed_fields(secrets: Sequence[str], id_: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The three fields of the scheme."""
    return {
        "webhook-id": id_,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": sign(secrets, id_, timestamp_s, body),
    }
