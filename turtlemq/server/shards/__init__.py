"""Several shards on one machine: a supervisor, and one process a shard behind the same port. Loaded only if `shards` is above 1.

`supervisor` starts the processes, `part` is what such a process adds to a server, `router` passes requests on to the owner of
their topic, `gather` asks all processes and `merge` makes one answer. Words are explained in docs/GLOSSARY.md.
"""
