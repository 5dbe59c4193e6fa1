"""Static files of the browser pages, which `turtlemq.server.handlers.pages` serves. Words: docs/GLOSSARY.md."""
