"""`python -m lockstep sync DIR...` sends runs that were logged without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .client import Client
from .errors import LockstepError, Unreachable
from .spool import RUN, folders, send_folder


def main() -> int:
    """Runs the command. Returns the exit status: 1 if a run could not be sent completely."""
    parser = argparse.ArgumentParser(prog="python -m lockstep", description="Commands for runs that programs log")
    commands = parser.add_subparsers(dest="command", required=True)
    sync = commands.add_parser("sync", help="send the parts of runs that the server lacks; can be repeated safely")
    sync.add_argument("dir", nargs="+", type=Path, help="the folder of a run, or a folder with such folders")
    arguments = parser.parse_args()
    try:
        with Client() as client:
            return max(send_runs(dir, client) for dir in arguments.dir)
    # The server's URL or the token is unusable, or the server is unreachable.
    except LockstepError as error:
        print(f"nothing more was sent: {error}", file=sys.stderr)
        return 1


def send_runs(dir: Path, client: Client) -> int:
    """Sends the runs in a folder. Returns the exit status. Raises `Unreachable`."""
    status = 0
    paths = list(folders(dir))
    if not paths:
        print(f"{dir} has no runs: no folder in it has {RUN} and records.jsonl", file=sys.stderr)
        status = 1
    for path in paths:
        try:
            sender = send_folder(path, client)
        except Unreachable:
            raise
        except LockstepError as error:
            print(f"{path} was not sent completely: {error}", file=sys.stderr)
            status = 1
        else:
            print(f"{sender.id}: sent {sender.sent_records} records and {sender.sent_files} files")
    return status


if __name__ == "__main__":
    sys.exit(main())
