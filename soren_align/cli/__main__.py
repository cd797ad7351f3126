"""`python -m soren_align.cli`, as launchers start it on every rank."""

import sys

from .app import main

sys.exit(main())
