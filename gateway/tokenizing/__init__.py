"""Tokenizing exactly as the engine does, so that prefixes can be looked up before routing."""
