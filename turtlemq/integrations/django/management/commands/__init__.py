"""Management commands of the app, found by Django by the names of their modules. Words: docs/GLOSSARY.md."""
