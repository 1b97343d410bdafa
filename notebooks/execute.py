"""Execute the notebooks and write their outputs into them: ``python -m notebooks.execute [NAME ...]``.

A notebook is kept as a reader sees it: printed text and pictures, without warnings, execution times
or other things that differ from run to run. ``tests/test_notebooks.py`` executes them again and
compares what they print.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from llmem.estimate import versions

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))


def executed(name: str) -> Any:
    """The notebook ``name`` with fresh outputs. Raises CellExecutionError where a cell fails."""
    notebook = nbformat.read(path_of(name), as_version=4)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources=where).execute()
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = _kept(cell.outputs)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "llmem": {"versions": versions()},
    }
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    """What a cell printed."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def _kept(outputs: list[Any]) -> list[Any]:
    """Printed text as one output, then pictures and tables; warnings and bare reprs are dropped."""
    text = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    first = [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []
    return first + [o for o in outputs if o.output_type == "display_data"]


def main(names: list[str]) -> None:
    for name in names or NAMES:
        print(f"{path_of(name)} ...", flush=True)
        nbformat.write(executed(name), path_of(name))


if __name__ == "__main__":
    main(sys.argv[1:])
