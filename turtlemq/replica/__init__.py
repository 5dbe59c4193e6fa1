"""Replication: the leader of a data folder ships every change of its files, and standbys repeat these changes in order.

A standby's folder is in the state that a kill of the leader would leave, so a failover is `Engine.open`. The
engine knows nothing of this: its Door does (`shipping.ShippingDoor`). Words: docs/GLOSSARY.md.
"""
