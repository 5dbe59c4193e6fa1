"""Request bodies: decompression, and JSON or BSON messages decoded into the columns of a batch. Words: docs/GLOSSARY.md."""
