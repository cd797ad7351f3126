"""`soren-align`, with FSDP2 on CPUs: python -m tests.hosts.fsdp2."""

import sys

from soren_align.cli.app import main
from tests.soak.runs import allow_fsdp2_on_cpus

allow_fsdp2_on_cpus()
sys.exit(main())
