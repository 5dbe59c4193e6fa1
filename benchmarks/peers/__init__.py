"""The queues that people use today, each at its best, behind one small interface."""
