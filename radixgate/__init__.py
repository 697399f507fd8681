"""The command line: the only package that knows both the gateway and the engine workers."""

__version__ = "0.1.0"
