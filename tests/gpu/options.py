"""Parses the options of these programs."""

import argparse


def parse_options(**options):
    """Each option is given with its default or, if it is required, its type; in a list if it takes several values."""
    parser = argparse.ArgumentParser()
    for name, value in options.items():
        several = isinstance(value, list)
        first = value[0] if several else value
        required = isinstance(first, type)
        parser.add_argument(
            "--" + name.replace("_", "-"), nargs="+" if several else None, type=first if required else type(first),
            required=required, default=None if required else value,
        )
    return parser.parse_args()
