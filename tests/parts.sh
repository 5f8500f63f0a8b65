# Sourced by tests/run and .ci/run: parts of a run, and how long each took.

# A script that is started by another adds its parts to the other's table.
if [[ -z ${LOCKSTEP_PARTS:-} ]]; then
    LOCKSTEP_PARTS=$(mktemp)
    export LOCKSTEP_PARTS
    trap 'report' EXIT
fi

# part NAME COMMAND...: runs a command; its status.
part() {
    local name=$1 began=$SECONDS status=0
    shift
    "$@" || status=$?
    printf '%5d s  %s%s\n' $((SECONDS - began)) "$name" "$([[ $status == 0 ]] || echo ': FAILED')" >>"$LOCKSTEP_PARTS"
    return $status
}

report() {
    echo "time of each part:"
    cat "$LOCKSTEP_PARTS"
    printf '%5d s  in all\n' $SECONDS
    rm -f "$LOCKSTEP_PARTS"
}
