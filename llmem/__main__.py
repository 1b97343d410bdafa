"""``python -m llmem``."""

from llmem.cli import main

main()
