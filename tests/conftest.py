"""What every test may ask for: the real SmolLM2 file where it is at hand, and hypothesis without surprises."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from tradewind.config.env import cache_dir

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Whoever starts the tests in the background of a script hands down an ignored Ctrl-C; the tests of Ctrl-C need it as in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a red test is then red for everybody. `--hypothesis-profile=search` looks for new ones.
settings.register_profile("steady", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("search", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("steady")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real SmolLM2 file: named by $TRADEWIND_SMOLLM2, or in the cache after `tradewind generate`; the test is skipped without it."""
    named = os.environ.get("TRADEWIND_SMOLLM2")
    for path in ([Path(named)] if named else []) + [cache_dir() / "models" / SMOLLM2]:
        if path.is_file():
            return path
    pytest.skip(
        f"{SMOLLM2} is not in the cache; run `tradewind generate Hello` once, or name the file in $TRADEWIND_SMOLLM2"
    )
