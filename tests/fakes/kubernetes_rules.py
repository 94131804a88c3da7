"""What an API server and a scheduler demand of pods; each rule with its source.

Sources: OpenAPI, by the schemas of kubernetes-validate; "validation":
kubernetes/pkg/apis/core/validation; "labels": kubernetes.io, "Labels and Selectors", Syntax;
"PSS": kubernetes.io, "Pod Security Standards", Baseline; "scheduler": messages of the plugins
in kubernetes/pkg/scheduler/framework/plugins.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import jsonschema
import referencing
from kubernetes_validate.utils import schema_contents

VERSIONS = ("1.30.0", "1.37.0")
"""The oldest and the newest that are validated against."""
_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


class RefusedError(Exception):
    """An answer that is an error: status, reason and message of ``metav1.Status``."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message


@cache
def _validator(version: str, kind: str, group: str, *, strict: bool = True) -> Any:
    folder = f"kubernetes-json-schema/v{version}-local{'-strict' if strict else ''}"
    schema = schema_contents(f"{folder}/{kind}-{group}.json", version)
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    registry: Any = referencing.Registry()
    for one in (schema, definitions):
        registry = referencing.Resource.from_contents(one) @ registry
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


def check_schema(body: Mapping[str, Any], *, strict: bool = True) -> None:
    """Check an object against the published schemas.

    Raises:
        RefusedError: it does not fit one of them.
    """
    group, _, version = str(body.get("apiVersion")).rpartition("/")
    name = f"{group.partition('.')[0]}-{version}" if group else version
    for release in VERSIONS:
        found = _validator(release, str(body.get("kind")).lower(), name, strict=strict)
        for error in found.iter_errors(body):
            where = ".".join(map(str, error.absolute_path))
            raise RefusedError(
                400, "BadRequest", f"strict decoding error: {where}: {error.message}"
            )


def admit(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod that a request asks for.

    Raises:
        RefusedError: it breaks a rule.
    """
    check_schema(body)
    pod: dict[str, Any] = copy.deepcopy(dict(body))
    metadata, spec = pod["metadata"], pod["spec"]
    wrong = []
    if not _NAME.fullmatch(metadata["name"]):  # validation: a DNS subdomain
        wrong.append(f"metadata.name: {metadata['name']}")
    for key, value in metadata.get("labels", {}).items():  # labels
        if not _KEY.fullmatch(key) or not _LABEL.fullmatch(value):
            wrong.append(f"metadata.labels: {key}={value}")
    for key in metadata.get("annotations", {}):
        if not _KEY.fullmatch(key):
            wrong.append(f"metadata.annotations: {key}")
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    for container in spec["containers"]:
        if not container.get("image"):  # validation: "image" is required
            wrong.append("spec.containers[0].image: Required value")
        mounts = container.get("volumeMounts", ())
        wrong += [f"volumeMounts: {m['name']}" for m in mounts if m["name"] not in volumes]
        paths = Counter(mount["mountPath"] for mount in mounts)
        wrong += [f"mountPath: {path} must be unique" for path, n in paths.items() if n > 1]
        requests = container.get("resources", {}).get("requests", {})
        limits = container.get("resources", {}).get("limits", {})
        for name, quantity in {**requests, **limits}.items():
            if not _QUANTITY.fullmatch(quantity):
                wrong.append(f"resources: {name}: {quantity}")
            if "/" in name and requests.get(name) != limits.get(name):
                # validation: ValidateResourceRequirements, extended resources
                wrong.append(f"{name}: limit must be set for non overcommitable resources")
    for toleration in spec.get("tolerations", ()):
        seconds = toleration.get("tolerationSeconds")
        if seconds is not None and toleration.get("effect") != "NoExecute":  # validation
            wrong.append("effect must be 'NoExecute' when `tolerationSeconds` is set")
        if toleration.get("operator") == "Exists" and toleration.get("value"):
            wrong.append("value must be empty when `operator` is 'Exists'")
    if wrong:
        said = f'Pod "{metadata["name"]}" is invalid: {"; ".join(wrong)}'
        raise RefusedError(422, "Invalid", said)
    _check_security(metadata["name"], spec)
    return pod


def _check_security(name: str, spec: Mapping[str, Any]) -> None:
    wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    wrong += ["hostPath" for volume in spec.get("volumes", ()) if "hostPath" in volume]
    for container in spec["containers"]:
        if container.get("securityContext", {}).get("privileged"):
            wrong.append("privileged")
    if wrong:
        said = f'pods "{name}" is forbidden: violates PodSecurity "baseline:latest": '
        raise RefusedError(403, "Forbidden", said + ", ".join(wrong))


def selected(selector: str, labels: Mapping[str, str]) -> bool:
    """Return whether labels fit a selector of equalities and existences."""
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if not _KEY.fullmatch(key) or not _LABEL.fullmatch(value):
            raise RefusedError(400, "BadRequest", f"unable to parse requirement: {term}")
        if key not in labels or (equals and labels[key] != value):
            return False
    return True


def blocked_by(
    pod: Mapping[str, Any],
    node: Mapping[str, Any],
    there: Collection[Mapping[str, Any]],
    claims: Collection[str],
) -> str:
    """Return why a pod cannot be on a node with others, in the scheduler's words."""
    spec, labels = pod["spec"], node["metadata"]["labels"]
    for volume in spec.get("volumes", ()):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            return f'persistentvolumeclaim "{claim}" not found'
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    for taint in node["spec"]["taints"]:
        if not any(_tolerates(one, taint) for one in spec.get("tolerations", ())):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    used: Counter[str] = Counter()
    for other in (pod, *there):
        for container in other["spec"]["containers"]:
            for name, quantity in container["resources"]["requests"].items():
                used[name] += _amount(quantity)
    for name, amount in used.items():
        if amount > _amount(node["status"]["allocatable"].get(name, "0")):
            return f"Insufficient {name}"
    return ""


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same: bool = toleration.get("key") == taint["key"]
    return same and toleration.get("value", "") == taint.get("value", "")


def _amount(quantity: str) -> int:
    """Return a quantity in thousandths."""
    number = re.match(r"[\d.]+", quantity)
    assert number is not None
    powers = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    binary = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    unit = quantity[number.end() :]
    factor = 1 if unit == "m" else 1000 * {**powers, **binary, "": 1}[unit]
    return int(float(number[0]) * factor)
