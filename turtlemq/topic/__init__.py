"""One topic: it joins an Index (sleeping messages), a Broker (due messages) and the dead letters. Words: docs/GLOSSARY.md."""
