"""One cluster for all tests of this folder, and the program `soren-align` on the PATH of its jobs."""

import os
import sys
from pathlib import Path

import pytest
from soren_align.core.shipped import ROOT
from tests.slurm.cluster import cluster, missing_programs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    reason = f"not installed: {', '.join(missing)} (docs/distributed.md)" if (missing := missing_programs()) else None
    for item in items:
        if reason and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The running Cluster; `soren-align` in its jobs is this source tree."""
    programs = tmp_path_factory.mktemp("bin")
    write_program(programs / "soren-align", f'exec "{sys.executable}" -m soren_align "$@"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(ROOT))
        for name, text in {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}.items():
            patch.setenv(name, text)
        with cluster(tmp_path_factory.mktemp("slurm")) as slurm:
            yield slurm


def write_program(file, text):
    """Write a shell script that can be executed."""
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
