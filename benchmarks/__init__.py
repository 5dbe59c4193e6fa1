"""Benchmarks of TurtleMQ: `python -m benchmarks --help`. What is measured and how to read it: docs/PERFORMANCE.md.

One file a family; each measures in processes of its own, so that figures do not colour each other. Nothing is asserted here.
"""
