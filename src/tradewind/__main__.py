"""`python -m tradewind`, and the program `tradewind`.

Knows: how Ctrl-C is heard wherever it falls: during imports, inside a callback, after everything is done.
Refuses to know: commands (cli).
"""

from __future__ import annotations

import _thread
import sys
import time


def main() -> int:
    """Runs the command line and returns its exit code. For a process of its own: changes how the interpreter handles Ctrl-C."""
    sys.unraisablehook = _press_again
    pressed: list[int] = []
    code = 130
    try:
        import signal

        # Extension modules lose an exception that meets them while they are imported: Ctrl-C is held back for these milliseconds.
        signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
        import msgspec  # noqa: F401

        from tradewind.cli import main as command

        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not pressed:
            code = command()
    except KeyboardInterrupt:
        pass
    # CPython remembers that Ctrl-C passed through the running of a text (every dataclass runs one while it is imported) and then ends the
    # process by the signal, whatever its exit code, although it was caught. It forgets when it runs the next text.
    exec("")
    import signal

    # Nothing is left to clean up: from here on Ctrl-C just ends the process, without a traceback from the interpreter's own ending.
    signal.signal(signal.SIGINT, signal.SIG_IGN if code == 130 else signal.SIG_DFL)
    return code


def _press_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Ctrl-C that fell into a callback (every import has one) would be printed and lost; it is pressed again a moment later."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return

    def press() -> None:
        time.sleep(0.01)
        _thread.interrupt_main()

    _thread.start_new_thread(press, ())


if __name__ == "__main__":
    sys.exit(main())
