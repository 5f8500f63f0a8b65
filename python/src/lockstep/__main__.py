"""`python -m lockstep sync DIR...` sends runs that were logged without a server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .client import Client
from .errors import LockstepError, RunDeleted, Unreachable
from .spool import run_folders, send_folder


def main() -> int:
    """Runs the command. Returns the exit status: 1 if a run could not be sent completely."""
    parser = argparse.ArgumentParser(prog="python -m lockstep", description="Commands for runs that programs log")
    commands = parser.add_subparsers(dest="command", required=True)
    sync = commands.add_parser("sync", help="send the parts of runs that the server lacks; can be repeated safely")
    sync.add_argument("dir", nargs="+", type=Path, help="the folder of a run, or a folder with such folders")
    sync.add_argument("--again", action="store_true", help="also send runs that were deleted on the server")
    arguments = parser.parse_args()
    try:
        with Client() as client:
            return max(send_runs(dir, client, arguments.again) for dir in arguments.dir)
    # The server's URL or the token is unusable, or the server is unreachable.
    except LockstepError as error:
        print(f"nothing more was sent: {error}", file=sys.stderr)
        return 1


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def send_runs(dir: Path, client: Client, again: bool) -> int:
    """Sends the runs in a folder. `again`: see the option. Returns the exit status. Raises `Unreachable`."""
    try:
        paths = run_folders(dir)
    except LockstepError as error:
        print(error, file=sys.stderr)
        return 1
    status = 0
    for path in paths:
        try:
            sender = send_folder(path, client, again)
        except Unreachable:
            raise
        except RunDeleted as error:
            print(f"{error}. The option --again sends the run again", file=sys.stderr)
            status = 1
        except LockstepError as error:
            print(f"{path} was not sent completely: {error}", file=sys.stderr)
            status = 1
        else:
            records, files = _count(sender.sent_records, "record"), _count(sender.sent_files, "file")
            has_sent = sender.sent_records or sender.sent_files
            print(f"{sender.id}: sent {records} and {files}" if has_sent else f"{sender.id}: is complete on the server")
    return status


if __name__ == "__main__":
    sys.exit(main())
