"""`python -m async_pp.models [default|tiny]`: make a model if it is not there yet, and print its folder."""

import argparse
import sys
from pathlib import Path

from async_pp.errors import ConfigError
from async_pp.models import ensure_default, ensure_tiny
from async_pp.models.cache import cache_root


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m async_pp.models", description=__doc__)
    parser.add_argument("model", nargs="?", choices=("default", "tiny"), default="default")
    parser.add_argument("--cache-dir", type=Path, help=f"where to keep it (default: {cache_root()})")
    parser.add_argument("--layers", type=int, default=8, help="layers of the tiny model (default: 8)")
    parser.add_argument("--verify", action="store_true", help="compare every byte with its checksum, not only sizes")
    args = parser.parse_args(argv)
    try:
        if args.model == "tiny":
            folder = ensure_tiny(args.cache_dir, layers=args.layers, verify=args.verify)
        else:
            folder = ensure_default(args.cache_dir, verify=args.verify)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the next run goes on from here", file=sys.stderr)
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
