"""Helpers that several test modules share: worlds, fake disks, server processes. No test lives here."""
