"""The limits to compare with: a plain `recv_into` loop over the same sockets, and the least that a broker does.

The plain loop does not read the bytes. The other one keeps them for a while and computes one checksum of each block.
"""

from __future__ import annotations

import selectors
import socket

from awscrt.checksums import crc32c

from benchmarks.children.commands import answer, options, use_cubic
from memq.limits import MIB

READ_BYTES = MIB  # as large as a slab
KEPT_BYTES = 100 * MIB  # more than the caches hold


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    use_cubic(listener)
    port = listener.getsockname()[1]
    answer(address=f"127.0.0.1:{port}")
    block_bytes = int(options().get("checked_block_bytes", 0))  # 0: nothing is kept or checked
    memory, at = memoryview(bytearray(KEPT_BYTES if block_bytes else READ_BYTES)), 0
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)  # the parent closes it
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
                continue
            connection = key.fileobj  # type: ignore[assignment]  # only sockets are left
            received = connection.recv_into(memory[at : at + READ_BYTES])
            if not received:
                selector.unregister(connection)
                connection.close()
            elif block_bytes:
                end = at + received
                for start in range(at, end, block_bytes):
                    crc32c(memory[start : min(start + block_bytes, end)])
                at = end if end + READ_BYTES <= KEPT_BYTES else 0


if __name__ == "__main__":
    main()
