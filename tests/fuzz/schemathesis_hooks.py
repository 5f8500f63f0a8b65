"""Further checks for schemathesis (`SCHEMATHESIS_HOOKS`): a role may only make the calls that its scope allows, and no response contains
another person's private job. `LOCKSTEP_FUZZ` has the settings of the role as JSON."""

import json
import os

import schemathesis

SETTINGS = json.loads(os.environ["LOCKSTEP_FUZZ"])
# The scopes of the calls that a token of each scope may make.
ALLOWED = {None: set(), "read": {"read"}, "submit": {"read", "submit"}, "admin": {"read", "submit", "admin"}, "agent": {"agent"}}


def needed_scope(operation):
    """Returns the scope that a call needs according to the document; None if it needs no token."""
    for scheme in operation.definition.raw.get("security") or []:
        for scopes in scheme.values():
            return scopes[0] if scopes else None
    return None


@schemathesis.check
def role_conformance(ctx, response, case):
    scope = needed_scope(case.operation)
    # Other checks send other methods to the path.
    is_documented_method = response.request.method == case.operation.method.upper()
    if is_documented_method and scope is not None and scope not in ALLOWED[SETTINGS["scope"]] and response.status_code < 400:
        raise AssertionError(f"{SETTINGS['role']} got status {response.status_code} for a call that needs the scope {scope}")


@schemathesis.check
def nothing_private(ctx, response, case):
    if SETTINGS["marker"] and SETTINGS["marker"].encode() in response.content:
        raise AssertionError(f"{SETTINGS['role']} received content of another person's private job")


@schemathesis.hook
def filter_case(context, case):
    # Leaves out requests for the accounts and tokens that the rest of the run needs.
    names = {str(value) for value in (case.path_parameters or {}).values()}
    return not names & set(SETTINGS["protected"])
