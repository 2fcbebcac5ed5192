"""Entry point. Imports only what `--help` and the quick checks need; everything heavy follows in `program`."""

import sys

from async_pp.serve.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
