# Sourced by tests/run and .ci/run: how long each part of a run took, and packages of Python.

# A script that is started by another adds its parts to the other's table.
if [[ -z ${LOCKSTEP_PARTS:-} ]]; then
    LOCKSTEP_PARTS=$(mktemp)
    export LOCKSTEP_PARTS
    trap report EXIT
fi

report() {
    echo "time of each part:"
    cat "$LOCKSTEP_PARTS"
    printf '%5d s  in all\n' $SECONDS
    rm -f "$LOCKSTEP_PARTS"
}

# record NAME BEGAN: a row of the table, for what began when SECONDS was BEGAN.
record() { printf '%5d s  %s\n' $((SECONDS - $2)) "$1" >>"$LOCKSTEP_PARTS"; }

# part NAME COMMAND...: runs a program and records how long it took; its status. For a function, whose commands would no longer end
# the script when they fail, use `record`.
part() {
    local name=$1 began=$SECONDS status=0
    shift
    "$@" || status=$?
    [[ $status == 0 ]] || name+=": FAILED"
    record "$name" "$began"
    return $status
}

# install_python FOLDER PACKAGE...: these versions, in target/FOLDER.
install_python() {
    local folder=target/$1
    shift
    [[ $(cat "$folder/VERSION" 2>/dev/null) == "$*" ]] && return
    echo "installing $* in $folder"
    rm -rf "$folder"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$folder" "$@"
    echo "$*" >"$folder/VERSION"
}
