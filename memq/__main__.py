"""`python -m memq`: the command line without its script."""

from __future__ import annotations

import sys

from memq.cli import main

sys.exit(main())
