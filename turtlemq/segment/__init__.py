"""Segment files: byte layout (`format`), scan (`scan`), reading and creating (`log`), and the tables over them (`table`).

Shared by the engine, `check`, `inspect` and Spark: nothing about the file format is written anywhere else. docs/FORMAT.md is the
specification; words: docs/GLOSSARY.md.
"""
