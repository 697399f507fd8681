"""The tests mirror the packages; tests/integration drives real engines."""
