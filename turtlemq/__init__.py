"""TurtleMQ: a delayed message queue in plain files.

Only the version lives here. Spark executors import this package for its file format alone, so this module
imports nothing: import from the module that owns a name (`turtlemq.engine`, `turtlemq.client`, …). How the
packages fit together: docs/ARCHITECTURE.md. Words: docs/GLOSSARY.md.
"""

__version__ = "0.1.0"
