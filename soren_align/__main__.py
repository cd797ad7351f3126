"""`python -m soren_align`, as launchers start it on every rank."""

import sys

from .cli.app import main

sys.exit(main())
