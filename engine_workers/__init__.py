"""Launching vLLM and keeping it alive; what runs beside an engine."""
