"""Segment files: their byte layout (format), names (names), the scan that reads them back (scan), the log that appends (log).

Shared by the engine, `check`, `inspect` and Spark: nothing about the format is written anywhere else.
"""
