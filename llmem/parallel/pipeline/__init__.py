"""Pipelines: stages, schedules, and a rank's share of them."""
