"""Show the spectra of a run and the output of every map on them, without training."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from ..run_folder import RunFolder
from ..silence import quiet_libraries
from ..terminal import Terminal, print_labelled, stderr_console
from .environment import set_environment


def spectrum(run: str, globs: Sequence[str], *, output: str | None = None, as_json: bool = False) -> None:
    """Print the tables, or JSON, and write the pictures into the folder `output`."""
    folder = RunFolder(run)
    folder.record()
    pictures = None if output is None else Path(output)
    if pictures is not None and pictures.exists() and not pictures.is_dir():
        raise UserError(f"--output: {output}: is a file; name a folder")
    folder.lock(shared=True)
    try:
        set_environment(None)
        console = stderr_console()
        with console.status("Loading torch"):
            from ..bench import run_spectra, spectra_figure, spectra_tables
        with quiet_libraries(), console.status("Reading the spectra") as status:
            source, spectra = run_spectra.spectra_of_run(folder, globs)
            maps, records = run_spectra.all_maps(), []
            for number, each in enumerate(spectra, 1):
                status.update(f"Mapping spectrum {number} of {len(spectra)}")
                records.append(run_spectra.measure(each, maps))
    finally:
        folder.release()
    if as_json:
        sys.stdout.write(run_spectra.as_json(source, records) + "\n")
    else:
        Terminal().print(spectra_tables.tables(source, records), highlight=False)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        with quiet_libraries(), console.status("Drawing"):
            files = spectra_figure.draw(spectra, maps, pictures)
        print_labelled(console, "written", f"{pictures}: {', '.join(file.name for file in files)}")
