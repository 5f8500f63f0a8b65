"""Checks of created objects: Kubernetes' own checks, and whether the pods get the names and indices that they need."""

from state import STORE, Refused


def invalid(kind, name, field, message):
    return Refused(422, "Invalid", f'{kind} "{name}" is invalid: {field}: {message}')


def subdomain(job):
    return job["spec"]["template"]["spec"].get("subdomain")


def check_job(job):
    name, spec = job["metadata"]["name"], job["spec"]
    policy = spec.get("podReplacementPolicy")
    if "podFailurePolicy" in spec and policy not in (None, "Failed"):
        raise invalid("Job.batch", name, "spec.podReplacementPolicy", f'Unsupported value: "{policy}": supported values: "Failed"')
    # Kubernetes would accept the Job, but its pods would have neither an index nor a host name.
    if "template" in spec and subdomain(job) and spec.get("completionMode") != "Indexed":
        raise invalid("Job.batch", name, "spec.completionMode", "these pods rely on their index: must be Indexed")


def check_service(namespace, service):
    name = service["metadata"]["name"]
    jobs = [o for k, o in STORE.items() if k[:2] == ("jobs", namespace) and "template" in o["spec"]]
    # Kubernetes would accept the Service, but the pods' names would not resolve.
    if any(subdomain(job) == name for job in jobs) and service["spec"].get("clusterIP") != "None":
        raise invalid("Service", name, "spec.clusterIP", "these pods rely on their names: must be None")


def check(resource, namespace, item):
    if resource == "jobs":
        check_job(item)
    if resource == "services":
        check_service(namespace, item)
