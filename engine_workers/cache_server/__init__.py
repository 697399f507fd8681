"""The cache server: one process on each node that keeps KV blocks and moves them between tiers."""
