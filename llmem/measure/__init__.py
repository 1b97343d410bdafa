"""Run a RunSpec for real, write down what it allocated, and lay the prediction beside it.

``measure`` starts the processes and returns a record (JSON); ``validate`` compares a record with
``llmem.estimate``.
"""

from llmem.measure.launch import measure, measure_all
from llmem.measure.validate import Row, validate

__all__ = ["Row", "measure", "measure_all", "validate"]
