"""Texts about failed connections: the cause, and the option that helps."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import SplitResult

PROBE_S = 2.0  # for a look whether a port speaks TLS


def connection_error(url: str, parts: SplitResult, error: Exception) -> str:
    """The text for an exception of a connection to `url`."""
    if isinstance(error, BrokenPipeError):
        return f"{url} hung up while it was spoken to; its log may say why."
    said = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(url, error)
    if parts.scheme == "https" and isinstance(error, ssl.SSLError) and not _speaks_tls(parts):
        return f"{url} does not speak TLS ({said}). Use http:// in --url or TURTLEMQ_URL."
    if (
        parts.scheme == "http"
        and not isinstance(error, ConnectionRefusedError | TimeoutError | socket.gaierror)
        and _speaks_tls(parts)
    ):
        return f"{url} speaks TLS only. Use https:// in --url or TURTLEMQ_URL."
    return (
        f"no answer from {url}: {said}. Is the server running? "
        "Start one with 'turtlemq serve', or say where it is with --url or TURTLEMQ_URL."
    )


def _untrusted(url: str, error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message.rstrip(".")
    if "match" in why:  # of names and addresses
        return f"the certificate of {url} is for another name: {why}. Use a name of the certificate in --url or TURTLEMQ_URL."
    return (
        f"the certificate of {url} is not trusted: {why}. If it is one of your own, name the file of its authority with "
        "--cacert or TURTLEMQ_CACERT."
    )


def _speaks_tls(parts: SplitResult) -> bool:
    """Whether a TLS handshake with the server succeeds. No certificate is checked, and nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with (
            socket.create_connection((parts.hostname or "", port), PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname),
        ):
            return True
    except OSError:
        return False
