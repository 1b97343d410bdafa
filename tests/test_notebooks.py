"""The notebooks run, and print what their committed outputs say."""

from __future__ import annotations

import nbformat
import pytest

from llmem.estimate import versions

pytest.importorskip("matplotlib")
pytest.importorskip("nbclient")

from notebooks.execute import NAMES, code_cells, executed, path_of, printed


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_whole(name: str) -> None:
    """Each code cell was executed, in order, and every figure that it shows is there."""
    cells = code_cells(nbformat.read(path_of(name), as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        pictures = [o for o in cell.outputs if "image/png" in o.get("data", {})]
        assert len(pictures) == cell.source.count("plt.show()")
        assert bool(printed(cell)) == ("print(" in cell.source)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_prints_the_same_again(name: str) -> None:
    """With the versions of libraries that the outputs were made with, to the last digit."""
    committed = nbformat.read(path_of(name), as_version=4)
    again = executed(name)
    made_with = {k: v for k, v in committed.metadata.llmem.versions.items() if k != "llmem"}
    if made_with != {k: v for k, v in versions().items() if k != "llmem"}:
        pytest.skip(f"executed; its committed figures are those of {made_with}")
    for before, after in zip(code_cells(committed), code_cells(again), strict=True):
        assert printed(after) == printed(before)
