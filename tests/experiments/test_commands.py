"""Every experiment's command starts: its imports hold and its arguments are declared."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8")
    for path in sorted(ROOT.glob("experiments/**/*.py"))
}
COMMANDS = [
    name for name, text in SOURCES.items() if "def main(" in text or '__name__ == "__main__"' in text
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "argparse" not in SOURCES[name] and "sys.argv" not in SOURCES[name]:  # it takes no arguments
        assert callable(importlib.import_module(name).main)
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, name, raising=False)  # runpy warns of a module that is there
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_the_walk_finds_commands() -> None:
    assert {"experiments.paper.table2", "experiments.real_runs.matrix"} <= set(COMMANDS)
