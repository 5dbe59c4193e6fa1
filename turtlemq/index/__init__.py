"""The Index: sleeping messages in segment files, found by due time and by id with almost nothing in memory.

Callers use `index.Index` (made by `recover.open_index`), its `maintenance`, and `columns` for documents of their own. Everything
else is private to the package. Does not know the Broker. Words: docs/GLOSSARY.md.
"""
