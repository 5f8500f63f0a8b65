"""What schemathesis checks in addition (`SCHEMATHESIS_HOOKS`): that nobody reaches what its role does not allow, and that an answer has
nothing of what is private to somebody else. `LOCKSTEP_FUZZ` says who asks."""

import json
import os

import schemathesis

WHO = json.loads(os.environ["LOCKSTEP_FUZZ"])
# What a token of each scope may ask for.
ALLOWS = {None: set(), "read": {"read"}, "submit": {"read", "submit"}, "admin": {"read", "submit", "admin"}, "agent": {"agent"}}


def needed(operation):
    """The scope that a call of the document needs; none for one that is open."""
    for scheme in operation.definition.raw.get("security") or []:
        for scopes in scheme.values():
            return scopes[0] if scopes else None
    return None


@schemathesis.check
def role_conformance(ctx, response, case):
    scope = needed(case.operation)
    # Another method of the address, or no token at all where the generator leaves it out, is the other checks' business.
    is_its_method = response.request.method == case.operation.method.upper()
    if is_its_method and scope is not None and scope not in ALLOWS[WHO["scope"]] and response.status_code < 400:
        raise AssertionError(f"{WHO['role']} is answered {response.status_code}, and the call needs the scope {scope}")


@schemathesis.check
def nothing_private(ctx, response, case):
    if WHO["marker"] and WHO["marker"].encode() in response.content:
        raise AssertionError(f"{WHO['role']} is shown what is private to somebody else")


@schemathesis.hook
def filter_case(context, case):
    # The token and the account that it asks with stay, so that the rest of the run is made with them.
    names = {str(value) for value in (case.path_parameters or {}).values()}
    return not names & set(WHO["kept"])
