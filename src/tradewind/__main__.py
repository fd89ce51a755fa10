"""`python -m tradewind`, and the program `tradewind`.

Knows: that Ctrl-C may come before anything is imported, and after everything is done. Refuses to know: commands (cli).
"""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        from tradewind.cli import main as command

        code = command()
    except KeyboardInterrupt:
        code = 130
    # Nothing is left to clean up: from here on Ctrl-C just ends the process, without a traceback from the interpreter's own ending.
    signal.signal(signal.SIGINT, signal.SIG_DFL if code != 130 else signal.SIG_IGN)
    return code


if __name__ == "__main__":
    sys.exit(main())
