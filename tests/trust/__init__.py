"""Machines that invent faults, and checkers that know the contract only. `python -m tests.trust --help`."""
