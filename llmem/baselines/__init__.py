"""Other people's estimators, each a small file with its source, behind one interface."""

from llmem.baselines.base import NAMES, BaselineInput, BaselineResult, run

__all__ = ["NAMES", "BaselineInput", "BaselineResult", "run"]
