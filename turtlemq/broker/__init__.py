"""The Broker: what came due, in files of its own. Its ready log is here; groups, leases and history build on it."""
