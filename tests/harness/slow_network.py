"""A slow and lossy path between network namespaces: `python -m tests.harness.slow_network HOST=ADDRESS …`.

Each host has a TUN device `slow`. Packets that are routed into it come here, wait, and go out of the device of their target. The
figures come as lines on standard input: `[seconds, jitter, loss]`.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time

_TUN, _NO_HEAD, _SET_NAME = 0x0001, 0x1000, 0x400454CA  # of linux/if_tun.h
_NET = 0x40000000  # CLONE_NEWNET
_TARGET = slice(16, 20)  # of an IPv4 head
_PACKET_MAX = 65_536


def device(host: str) -> int:
    """A descriptor of the TUN device of a host. The process stays in that host's namespace."""
    space = os.open(f"/run/netns/{host}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, _NET):
        raise OSError(ctypes.get_errno(), f"no way into the namespace {host}")
    os.close(space)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _SET_NAME, struct.pack("16sH22x", b"slow", _TUN | _NO_HEAD))
    return fd


def main(arguments: list[str]) -> None:
    hosts = dict(argument.split("=") for argument in arguments)
    devices = {host: device(host) for host in hosts}
    by_address = {socket.inet_aton(hosts[host]): fd for host, fd in devices.items()}
    poll = select.poll()
    for fd in (0, *devices.values()):
        poll.register(fd, select.POLLIN)
    delay, jitter, loss = 0.0, 0.0, 0.0
    waiting: list[tuple[float, int, int, bytes]] = []  # time, number, device, packet
    number = 0
    while True:
        rest_s = waiting[0][0] - time.monotonic() if waiting else 1.0
        for fd, _ in poll.poll(max(0, rest_s * 1000)):
            if fd == 0:
                line = sys.stdin.readline()
                if not line:
                    return
                delay, jitter, loss = json.loads(line)
                print("ok", flush=True)
                continue
            packet = os.read(fd, _PACKET_MAX)
            target = by_address.get(packet[_TARGET])
            if target is not None and random.random() >= loss:
                number += 1
                heapq.heappush(waiting, (time.monotonic() + delay + random.uniform(0, jitter), number, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, target, packet = heapq.heappop(waiting)
            try:
                os.write(target, packet)
            except BlockingIOError:
                pass  # the queue of the device is full: one more lost packet


if __name__ == "__main__":
    main(sys.argv[1:])
