"""The Index: sleeping messages in segment files, found by due time and by id with almost nothing in memory."""
