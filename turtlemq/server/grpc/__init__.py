"""gRPC over HTTP/2, as an extra (`turtlemq[grpc]`): the stream of the Hyper Delay Server, and its dead letters.

`framing`, `http2` and `window` are pure: bytes in, messages and bytes out. `connection` is the thin asyncio protocol around them;
a handler knows only its `Call`, which gives lists of messages and takes lists of messages. The words are explained in
docs/GLOSSARY.md, the services in docs/GRPC.md. A server without `grpc_port` loads nothing of this package.
"""
