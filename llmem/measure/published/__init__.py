"""Published runs: files of them, their rows as RunSpecs, and how predictions fare."""
