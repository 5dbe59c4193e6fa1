"""Responses: their types, and messages encoded as JSON or BSON. Words: docs/GLOSSARY.md."""
