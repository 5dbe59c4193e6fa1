"""Benchmarks of TurtleMQ: `python -m benchmarks --help`. The figures and their meaning: docs/PERFORMANCE.md.

One file for each family of figures. Each measurement runs in its own process, so that figures do not influence each other. No
figure is asserted. Words are explained in docs/GLOSSARY.md.
"""
