"""The Broker of a topic: due messages in the ready log, consumer groups, leases, retries and history. Words: docs/GLOSSARY.md.

`broker.Broker` is the face, `opening.open_broker` makes one. Files: the ready log (`ready_*`), two journals (`journal`, `events`)
and the checkpoint (`checkpoint`, `save`, `replay`). Not here: sleeping messages (`turtlemq.index`), dead letters
(`turtlemq.topic`), and the decision in which state a message is (`turtlemq.standing`).
"""
