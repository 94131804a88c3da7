"""The fake AWS's process: prints its port, ends when its standard input does."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from tests.fakes.http_server import serve

IMAGES = [
    {
        "ami_id": f"ami-{day:08d}",
        "name": f"Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Ubuntu 24.04) {day}",
        "description": "",
        "owner_id": "898082745236",
        "public": True,
        "virtualization_type": "hvm",
        "architecture": "x86_64",
        "state": "available",
        "platform": None,
        "image_type": "machine",
        "hypervisor": "xen",
        "root_device_name": "/dev/sda1",
        "root_device_type": "ebs",
        "sriov": "simple",
        "creation_date": f"2026-{day // 100:02d}-{day % 100:02d}T00:00:00.000Z",
    }
    for day in (901, 1101)
]


def main() -> None:
    """Serve until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images.json"
        images.write_text(json.dumps(IMAGES))
        os.environ["MOTO_AMIS_PATH"] = str(images)  # read when moto is imported
        from moto.ec2.models import instances
        from moto.moto_server.werkzeug_app import MotoRequestHandler
        from tests.fakes.aws_layer import Layer
        from tests.fakes.aws_world import World
        from werkzeug.serving import make_server

        world = World()

        class Handler(MotoRequestHandler):
            protocol_version = "HTTP/1.1"

            def date_time_string(self, timestamp: float | None = None) -> str:
                """Tell the cloud's time."""
                return super().date_time_string(timestamp or world.now())

            def log_request(self, *_: object) -> None:
                """Say nothing."""

        # Else time that was passed is not billed.
        vars(instances)["utcnow"] = world.moment
        server = make_server("127.0.0.1", 0, Layer(world), threaded=True, request_handler=Handler)
        serve(server)
        world.reset()  # its machines are processes
    os._exit(0)


if __name__ == "__main__":
    main()
