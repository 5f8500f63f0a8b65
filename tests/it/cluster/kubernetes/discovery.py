"""The API server's discovery documents, by which kubectl finds the URL for an object's kind."""

from state import GROUPS, KINDS

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def resources(group):
    found = [{"name": r, "singularName": "", "namespaced": True, "kind": KINDS[r], "verbs": VERBS} for r, g in GROUPS.items() if g == group]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{group}/v1".lstrip("/"), "resources": found}


def groups():
    def version(group):
        return {"groupVersion": f"{group}/v1", "version": "v1"}

    named = sorted({group for group in GROUPS.values() if group})
    found = [{"name": group, "versions": [version(group)], "preferredVersion": version(group)} for group in named]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


def answer(parts):
    """The document at this path, or None."""
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if parts == ["apis"]:
        return groups()
    if parts == ["api", "v1"]:
        return resources("")
    if len(parts) == 4 and parts[:3] == ["api", "v1", "namespaces"]:
        return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": parts[3]}}
    if len(parts) == 3 and parts[0] == "apis" and parts[2] == "v1":
        return resources(parts[1])
    return None
