"""The report for operators: Spark jobs over TurtleMQ's files, and an HTML page with their results.

How to use it: docs/REPORT.md. Words: docs/GLOSSARY.md. Not here: the data source that reads the files (`pyspark_turtlemq`).
"""
