"""A loopback of a pod's own: 127.0.0.1 is the address that ``POD_LOOPBACK`` says.

Python imports this at its start where this folder is on PYTHONPATH. Pods have network
namespaces; pods that are processes of one machine have not.
"""

import os
import socket
from typing import Any


def _mapped(call: Any) -> Any:
    def mapped(self: Any, address: Any) -> Any:
        if isinstance(address, tuple) and address[0] == "127.0.0.1":
            address = (os.environ["POD_LOOPBACK"], *address[1:])
        return call(self, address)

    return mapped


socket.socket.bind = _mapped(socket.socket.bind)  # type: ignore[method-assign]
socket.socket.connect = _mapped(socket.socket.connect)  # type: ignore[method-assign]
