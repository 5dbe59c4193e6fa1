"""The machine below: file operations, file names, reserved disk space and worker processes. Words: docs/GLOSSARY.md."""
