"""Moves KV blocks between a vLLM engine and the cache server of its node.

Only `radixgate_connector` knows vLLM; everything else runs and is tested without it.
"""
