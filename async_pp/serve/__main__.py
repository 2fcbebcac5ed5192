"""Entry point. Imports only what `--help` and the quick checks need; everything heavy follows in `program`."""

import sys

from async_pp.serve.program import main
from async_pp.serve.signals import leave

if __name__ == "__main__":
    # Everything has been closed by now; unloading the interpreter adds only time and the noise of native libraries.
    leave(main(sys.argv[1:]))
