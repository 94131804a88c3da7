"""Stand-ins for the clouds' command-line tools that connect to VMs' SSH servers.

They accept the arguments that the real ones document, nothing else, and connect to a
server on loopback.
"""

from __future__ import annotations

import sys
from pathlib import Path

_TOOL = """\
#!{python}
import os, socket, sys, threading
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
wanted = {{
    "aws": ["ssm", "start-session", "--target", "i-1", "--region", "us-east-1",
            "--document-name", "AWS-StartSSHSession", "--parameters", "portNumber=22"],
    "gcloud": ["compute", "start-iap-tunnel", "st-1", "22", "--listen-on-stdin",
               "--project=p", "--zone=us-central1-a", "--verbosity=warning"],
    "az": ["network", "bastion", "tunnel", "--name", "B", "--resource-group", "G",
           "--subscription", "S", "--target-resource-id",
           "/subscriptions/mine/resourceGroups/GROUP/providers/Microsoft.Compute"
           "/virtualMachines/st-1", "--resource-port", "22", "--port"],
}}[name]
if argv[:len(wanted)] != wanted:
    sys.exit(name + ": unknown arguments: " + " ".join(argv))
if os.environ.get("TOOL_REFUSES"):
    print("starting", file=sys.stderr)
    sys.exit(name + ": not signed in")
vm = socket.create_connection(("127.0.0.1", {port}))
if name == "az":
    print("Opening tunnel on port:", argv[-1])  # not part of the connection
    with socket.create_server(("127.0.0.1", int(argv[-1]))) as server:
        client, _ = server.accept()
    read, write = client.recv, client.sendall
else:
    read, write = (lambda size: os.read(0, size)), (lambda data: os.write(1, data))

def send():
    while data := read(65536):
        vm.sendall(data)
    vm.shutdown(socket.SHUT_WR)

threading.Thread(target=send, daemon=True).start()
while data := vm.recv(65536):
    write(data)
"""
NAMES = ("aws", "session-manager-plugin", "gcloud", "az")


def install(folder: Path, port: int) -> None:
    """Write the tools.

    Args:
        folder: Where; it belongs into PATH.
        port: Of the SSH server that stands for every VM.
    """
    folder.mkdir()
    for name in NAMES:
        file = folder / name
        file.write_text(_TOOL.format(python=sys.executable, port=port))
        file.chmod(0o755)
