"""HTTP callbacks: the server delivers messages to registered URLs. Loaded only if `push_hosts` names a host.

The rules (`policy`, `signature`, `hosts`) are pure; `sender` has the sockets, `delivery` the work of a group, `push` the whole.
Words are explained in docs/GLOSSARY.md.
"""
