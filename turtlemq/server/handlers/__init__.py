"""Request handlers of the HTTP interface, one module for each part of it. Words: docs/GLOSSARY.md."""
