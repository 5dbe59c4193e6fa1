"""Figures for operators: counting (`meter`), collecting, and the text format of Prometheus. Words: docs/GLOSSARY.md."""
