"""The pod of a job's manager, found again by its name."""

from __future__ import annotations

import time

from spottrain.cloud.kubernetes import pods
from spottrain.cloud.kubernetes.clients import Clients
from spottrain.cloud.kubernetes.settings import KubernetesSettings
from spottrain.cloud.port.provider import VmState


class ManagerPod:
    """The pod of one manager, which may not be there.

    Args:
        settings: Of the pod.
        uid: The job's unique id.
    """

    def __init__(self, settings: KubernetesSettings, uid: str) -> None:
        self._settings = settings
        self._uid = uid
        self._clients = Clients(settings)
        self.name = pods.manager_name_of(uid)

    def begin(self, job: str) -> None:
        """Create it, unless it is there.

        Args:
            job: The job's name.

        Raises:
            CloudError: the API server refuses, or does not answer.
        """
        owner = self._clients.user()
        made = pods.manager_manifest(self._settings, self.name, self._uid, job, owner)
        self._clients.create(made)

    def look(self) -> pods.Pod | None:
        """Return it, unless there is none or it has ended; raises as ``begin``."""
        found = pods.parse_pods(self._clients.pods(f"{pods.MANAGER}={self._uid}"), time.time())
        return next((pod for pod in found if pod.state is not VmState.TERMINATED), None)

    def end(self) -> None:
        """Delete it; raises as ``begin``."""
        self._clients.delete(self.name, pods.NOW_S)

    def argv(self, command: str, *, terminal: bool = False) -> list[str]:
        """Return the command line that runs a shell command in it."""
        shell = ["/bin/sh", "-c", command]
        return [*pods.kubectl(self._settings, terminal=terminal), self.name, "--", *shell]
