"""Thresholds between two implementations of one step: Python loops for small batches, numpy arrays for large ones. Pure.

A numpy call costs about 1 µs for one item or for a hundred, and one step makes 10 to 100 of them; a loop costs 0.3 to 5 µs an
item. At a thousand requests a second nearly every batch is small, so the hot steps have both. Both give the same result:
tests/test_small_batches.py runs every pair around its threshold.

Rules: one constant for one decision, with its measurement. Code reads it as `small_batches.NAME` when it decides, never by
`from … import NAME`, so that a test can set it. "Below" means that the loop takes batches of less than this size.

Not here: limits (`model`, `settings`), sizes of slices and caches, fast paths for exactly one item.
"""

from __future__ import annotations

# Documents on their way in and out. Encode: loop 0.8 µs each, arrays 35 to 50 µs. Look up ids in a part: loop 0.8 µs each, arrays
# 10 to 20 µs. Pick for a fetch: loop 25 µs + 3 µs each, arrays 100 to 150 µs. Loops below this many.
DOCUMENTS = 24

# Documents that the compiled kernel encodes, and ids that it enters into an `IdMap`: 3 µs + 0.06 µs each; a loop takes 0.6 to
# 1.3 µs each. Loops below this many.
KERNEL = 4

# Entries and look-ups of an `IdMap`: loop 1.3 µs each, arrays 25 to 40 µs. Loops below this many.
ID_MAP = 24

# Values added to a histogram: loop 0.2 µs each, arrays 4 to 8 µs. Loops below this many.
HISTOGRAM = 32

# Due messages of one handoff: loop 15 µs + 3 µs each, arrays 150 µs and more. Loops up to this many, which must be fewer than
# `firing` takes from any cursor (64).
HANDOFF = 60

# Keys of single messages that a memtable gathers in a sorted list before they become a run: 0.3 µs to insert a key, 20 µs to make
# a run of any size. They become a run when there are this many.
SINGLE_KEYS = 512

# Documents of one due time whose seqs are read to find one of them: one read of all costs less than the preads of a binary
# search, 3 µs each. Read up to this many.
TIES = 64

# Bytes that a fetch of the last documents reads in one piece without arrays. Above, arrays cost nothing beside the read.
READ_BYTES = 1 << 20

# Documents of one length whose checksums are computed in one pass: loop 0.15 µs each, arrays 20 µs + 0.07 µs each. Loops below
# this many for each length.
EQUAL_CHECKSUMS = 64

# Adjacent documents of one length that are verified by one checksum over all of them, see `bulk_crc`. Each alone below this many.
BULK_CHECKSUM = 64

# Pieces of one width that are copied in one go: alone 0.3 µs each, together 15 µs for each width. Alone below this many a width.
EQUAL_WIDTHS = 16

# Documents of one length in a row: then the scan tries to walk all that follow by arithmetic, 0.01 µs each instead of 0.4.
EVEN_WALK = 16

# Documents of a request in BSON: the library takes 1 µs each, arrays 60 µs for each layout. By the library below this many.
BSON_LAYOUT = 48

# Messages of one answer to a fetch: loop 2 µs each in JSON, 5 µs in BSON, arrays 100 µs. Loops below this many.
ANSWER = 64
