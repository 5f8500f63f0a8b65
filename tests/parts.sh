# Functions of tests/run and .ci/run: record the time of each part of a run, and install Python packages.

# A script that is started by another script adds its parts to that script's table, whose file is $LOCKSTEP_PARTS.
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

# record NAME BEGAN: adds a row to the table for a part that began when $SECONDS was BEGAN.
record() { printf '%5d s  %s\n' $((SECONDS - $2)) "$1" >>"$LOCKSTEP_PARTS"; }

# part NAME COMMAND...: runs a command, records its time, and returns its status. Within the command, `set -e` has no effect, so use
# `record` for a function whose failing commands must end the script.
part() {
    local name=$1 began=$SECONDS status=0
    shift
    "$@" || status=$?
    [[ $status == 0 ]] || name+=": FAILED"
    record "$name" "$began"
    return $status
}

# install_python FOLDER PACKAGE...: installs packages (NAME==VERSION) into target/FOLDER, unless exactly these are installed there.
install_python() {
    local folder=target/$1
    shift
    [[ $(cat "$folder/VERSION" 2>/dev/null) == "$*" ]] && return
    echo "installing $* in $folder"
    rm -rf "$folder"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$folder" "$@"
    echo "$*" >"$folder/VERSION"
}
