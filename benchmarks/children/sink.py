"""The limit to compare with: a plain `recv_into` loop over the same sockets, which looks at nothing."""

from __future__ import annotations

import selectors
import socket

from benchmarks.children.commands import answer, use_cubic
from memq.limits import MIB


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    use_cubic(listener)
    port = listener.getsockname()[1]
    answer(address=f"127.0.0.1:{port}")
    buffer = memoryview(bytearray(1 * MIB))  # as large as a slab
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
            if not connection.recv_into(buffer):
                selector.unregister(connection)
                connection.close()


if __name__ == "__main__":
    main()
