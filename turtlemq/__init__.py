"""TurtleMQ: a delayed message queue in plain files.

Only the version lives here. Spark executors import this package for its file format alone, so this module
imports nothing: take what you need from the module that owns it (`turtlemq.engine`, `turtlemq.client`, …).
"""

__version__ = "0.1.0"
