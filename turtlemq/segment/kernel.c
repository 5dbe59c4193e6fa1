/* Loops over columns, compiled: encode documents, compute checksums, copy pieces, look up and enter hashes of ids.

   Optional. Each function does what one Python function of this package does with numpy, which stays the reference: `kernel.py` names
   the pairs, tests/test_kernel.py runs both on the same inputs. A function that is given anything but the plain case returns None, and
   the reference decides: errors of callers are raised there alone. Nothing here parses the bytes of clients or of files; every index
   is checked against the length of its buffer. Built by packages/build_kernel.py, against the stable ABI of Python 3.11. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "columns and documents are little-endian"
#endif

/* CRC-32 (zlib's polynomial, reflected). */

static uint32_t crc_table[8][256]; /* [k][b]: the effect of byte b with k bytes behind it */

static void fill_crc_table(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_table[0][b] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int b = 0; b < 256; b++)
            crc_table[k][b] = crc_table[k - 1][b] >> 8 ^ crc_table[0][crc_table[k - 1][b] & 255];
}

static uint32_t crc_bytes(uint32_t crc, const uint8_t *data, size_t size) { /* without the inversions before and after */
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = crc_table[7][word & 255] ^ crc_table[6][word >> 8 & 255] ^ crc_table[5][word >> 16 & 255] ^ crc_table[4][word >> 24 & 255] ^
              crc_table[3][word >> 32 & 255] ^ crc_table[2][word >> 40 & 255] ^ crc_table[1][word >> 48 & 255] ^ crc_table[0][word >> 56];
    }
    for (; size; data++, size--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *data) & 255];
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TABLES_ONLY) /* a test compiles it without */
#include <immintrin.h>
#define HAS_FOLDING 1
#define FOLDING __attribute__((target("pclmul,sse4.1")))

/* A multiplication without carries moves 16 bytes forward by a fixed distance: each half is multiplied by x to the power of its distance
   in bits, modulo the polynomial. The constants are those powers, reflected. */
FOLDING static inline __m128i moved(__m128i bytes, __m128i powers) {
    return _mm_xor_si128(_mm_clmulepi64_si128(bytes, powers, 0x00), _mm_clmulepi64_si128(bytes, powers, 0x11));
}

FOLDING static inline __m128i loaded(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)data); }

FOLDING static uint32_t crc_folded(uint32_t crc, const uint8_t *data, size_t size) { /* requires: size >= 64 */
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124), barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_halves = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(loaded(data), _mm_cvtsi32_si128((int)crc)), b = loaded(data + 16), c = loaded(data + 32), d = loaded(data + 48);
    for (data += 64, size -= 64; size >= 64; data += 64, size -= 64) {
        a = _mm_xor_si128(moved(a, by_64), loaded(data));
        b = _mm_xor_si128(moved(b, by_64), loaded(data + 16));
        c = _mm_xor_si128(moved(c, by_64), loaded(data + 32));
        d = _mm_xor_si128(moved(d, by_64), loaded(data + 48));
    }
    a = _mm_xor_si128(moved(a, by_16), b);
    a = _mm_xor_si128(moved(a, by_16), c);
    a = _mm_xor_si128(moved(a, by_16), d);
    for (; size >= 16; data += 16, size -= 16)
        a = _mm_xor_si128(moved(a, by_16), loaded(data));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10)); /* 128 bits to 96 */
    b = _mm_srli_si128(a, 4);
    a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low_halves), by_8, 0x00), b); /* to 64 */
    b = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low_halves), barrett, 0x10), low_halves);
    a = _mm_xor_si128(a, _mm_clmulepi64_si128(b, barrett, 0x00)); /* Barrett's reduction to 32 */
    return crc_bytes((uint32_t)_mm_extract_epi32(a, 1), data, size);
}
#endif

static int can_fold = 0;

static uint32_t crc32_of(const uint8_t *data, size_t size) {
#ifdef HAS_FOLDING
    if (can_fold && size >= 64)
        return ~crc_folded(~0u, data, size);
#endif
    return ~crc_bytes(~0u, data, size);
}

/* Columns: a buffer of integers, a list of Python integers, or one integer for all rows. */

typedef struct {
    Py_buffer view; /* view.obj is NULL unless it is a buffer */
    PyObject *list; /* borrowed */
    int64_t same;
    Py_ssize_t count; /* of items; -1: one for all */
    Py_ssize_t width; /* bytes of an item of a buffer */
} Column;

static int is_exact(PyObject *object, PyTypeObject *type) { return Py_TYPE(object) == type; }

static int open_buffer(PyObject *object, Py_buffer *view, int flags) { /* -1: it is none */
    if (PyObject_GetBuffer(object, view, flags | PyBUF_C_CONTIGUOUS) == 0)
        return 0;
    PyErr_Clear();
    view->obj = NULL;
    return -1;
}

static int open_column(PyObject *object, Column *column) {
    memset(column, 0, sizeof *column);
    if (is_exact(object, &PyLong_Type)) {
        int overflow;
        column->count = -1;
        column->same = PyLong_AsLongLongAndOverflow(object, &overflow);
        return overflow ? -1 : 0;
    }
    if (is_exact(object, &PyList_Type)) {
        column->list = object;
        column->count = PyList_Size(object);
        return 0;
    }
    if (open_buffer(object, &column->view, 0))
        return -1;
    column->width = column->view.itemsize;
    column->count = column->view.len / (column->width ? column->width : 1);
    return column->view.ndim == 1 && (column->width == 4 || column->width == 8) ? 0 : -1;
}

static void close_column(Column *column) {
    if (column->view.obj)
        PyBuffer_Release(&column->view);
}

static int item(const Column *column, Py_ssize_t i, int64_t *value) { /* of 4 bytes: unsigned; -1: no integer of 64 bits */
    if (column->count < 0) {
        *value = column->same;
    } else if (column->list) {
        PyObject *object = PyList_GetItem(column->list, i);
        int overflow;
        if (!object || !is_exact(object, &PyLong_Type)) {
            PyErr_Clear();
            return -1;
        }
        *value = PyLong_AsLongLongAndOverflow(object, &overflow);
        return overflow ? -1 : 0;
    } else if (column->width == 8) {
        memcpy(value, (const char *)column->view.buf + 8 * i, 8);
    } else {
        uint32_t small;
        memcpy(&small, (const char *)column->view.buf + 4 * i, 4);
        *value = small;
    }
    return 0;
}

static const int64_t *numbers(const Column *column, Py_ssize_t count) { /* of a buffer with 8 bytes an item; NULL: it is none */
    return column->width == 8 && column->count == count && ((uintptr_t)column->view.buf & 7) == 0 ? column->view.buf : NULL;
}

/* Texts: a list of bytes, or the rows of a matrix. */

typedef struct {
    Py_buffer view;
    PyObject *list;
    Py_ssize_t count, width;
} Texts;

static int open_texts(PyObject *object, Texts *texts) {
    memset(texts, 0, sizeof *texts);
    if (is_exact(object, &PyList_Type)) {
        texts->list = object;
        texts->count = PyList_Size(object);
        return 0;
    }
    if (open_buffer(object, &texts->view, PyBUF_ND))
        return -1;
    if (texts->view.ndim != 2 || texts->view.itemsize != 1)
        return -1;
    texts->count = texts->view.shape[0];
    texts->width = texts->view.shape[1];
    return 0;
}

static void close_texts(Texts *texts) {
    if (texts->view.obj)
        PyBuffer_Release(&texts->view);
}

static int text(const Texts *texts, Py_ssize_t i, const char **data, Py_ssize_t *size) {
    if (!texts->list) {
        *data = (const char *)texts->view.buf + i * texts->width;
        *size = texts->width;
        return 0;
    }
    PyObject *object = PyList_GetItem(texts->list, i);
    if (!object || !is_exact(object, &PyBytes_Type)) {
        PyErr_Clear();
        return -1;
    }
    *data = PyBytes_AsString(object);
    *size = PyBytes_Size(object);
    return 0;
}

static PyObject *not_mine(void) { /* the reference decides */
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Documents. The layout is that of format.py; docs/FORMAT.md has it as a table. */

enum { PREFIX_BYTES = 60, CRC_AT = 9, CHECKED_FROM = 13, DUE_AT = 18, SEQ_AT = 31, OPT_AT = 44, ID_BYTES_AT = 56, MIDDLE_BYTES = 12 };
static const char blank[PREFIX_BYTES + 1] = "\0\0\0\0\x10" "crc\0\0\0\0\0\x09" "due\0\0\0\0\0\0\0\0\0\x12" "seq\0\0\0\0\0\0\0\0\0\x12" "opt\0\0\0\0\0\0\0\0\0\x02" "id\0\0\0\0";
static const char body_name[6] = "\x05" "body";

static PyObject *document_lengths(PyObject *module, PyObject *args) { /* (ids, bodies, extras or None) -> 8 bytes each */
    PyObject *given_ids, *given_bodies, *given_extras, *out = NULL;
    Texts ids, bodies, extras;
    if (!PyArg_ParseTuple(args, "OOO", &given_ids, &given_bodies, &given_extras))
        return NULL;
    int bad = open_texts(given_ids, &ids) | open_texts(given_bodies, &bodies);
    memset(&extras, 0, sizeof extras);
    if (given_extras != Py_None)
        bad |= open_texts(given_extras, &extras);
    if (!bad && bodies.count == ids.count && (given_extras == Py_None || extras.count == ids.count)) {
        out = PyBytes_FromStringAndSize(NULL, 8 * ids.count);
        char *lengths = out ? PyBytes_AsString(out) : NULL;
        for (Py_ssize_t i = 0; lengths && i < ids.count; i++) {
            const char *data;
            Py_ssize_t id_size, body_size, extra_size = 0;
            if (text(&ids, i, &data, &id_size) || text(&bodies, i, &data, &body_size) ||
                (given_extras != Py_None && text(&extras, i, &data, &extra_size))) {
                Py_CLEAR(out);
                break;
            }
            int64_t length = PREFIX_BYTES + (int64_t)id_size + extra_size + MIDDLE_BYTES + body_size + 1;
            memcpy(lengths + 8 * i, &length, 8);
        }
    }
    close_texts(&ids), close_texts(&bodies), close_texts(&extras);
    return out ? out : not_mine();
}

typedef struct {
    Texts ids, bodies, extras;
    Column due, ttr, flags;
    int has_extras;
    int64_t seq; /* of the first document */
} Documents;

/* Write document i, at most `room` bytes. Returns its length, or -1. */
static Py_ssize_t write_document(const Documents *given, Py_ssize_t i, char *to, Py_ssize_t room) {
    const char *id, *body, *extra = NULL;
    Py_ssize_t id_size, body_size, extra_size = 0;
    int64_t due, ttr, flags;
    if (text(&given->ids, i, &id, &id_size) || text(&given->bodies, i, &body, &body_size) ||
        (given->has_extras && text(&given->extras, i, &extra, &extra_size)))
        return -1;
    if (item(&given->due, i, &due) || item(&given->ttr, i, &ttr) || item(&given->flags, i, &flags))
        return -1;
    Py_ssize_t length = PREFIX_BYTES + id_size + extra_size + MIDDLE_BYTES + body_size + 1;
    if (length > room || length > INT32_MAX || ttr < 0 || ttr > UINT32_MAX || flags < 0 || flags > UINT32_MAX)
        return -1;
    int32_t stated = (int32_t)length, id_bytes = (int32_t)id_size + 1, body_bytes = (int32_t)body_size;
    uint32_t options[2] = {(uint32_t)ttr, (uint32_t)flags};
    int64_t seq = given->seq + i;
    memcpy(to, blank, PREFIX_BYTES);
    memcpy(to, &stated, 4);
    memcpy(to + DUE_AT, &due, 8);
    memcpy(to + SEQ_AT, &seq, 8);
    memcpy(to + OPT_AT, options, 8);
    memcpy(to + ID_BYTES_AT, &id_bytes, 4);
    char *at = to + PREFIX_BYTES;
    memcpy(at, id, id_size);
    at += id_size;
    *at++ = 0;
    if (extra_size)
        memcpy(at, extra, extra_size);
    at += extra_size;
    memcpy(at, body_name, 6);
    memcpy(at + 6, &body_bytes, 4);
    at[10] = 0; /* the binary subtype */
    memcpy(at + 11, body, body_size);
    at[11 + body_size] = 0;
    uint32_t crc = crc32_of((const uint8_t *)to + CHECKED_FROM, length - CHECKED_FROM);
    memcpy(to + CRC_AT, &crc, 4);
    return length;
}

/* (into, at, first, last, ids, bodies, due_ms, first_seq, ttr_ms, flags, extras or None) -> where the documents [first, last) end in
   `into`, if they begin at `at`. */
static PyObject *encode(PyObject *module, PyObject *args) {
    PyObject *given_into, *given_ids, *given_bodies, *given_due, *given_ttr, *given_flags, *given_extras;
    Py_ssize_t at, first, last;
    long long seq;
    Documents given;
    Py_buffer into;
    if (!PyArg_ParseTuple(args, "OnnnOOOLOOO", &given_into, &at, &first, &last, &given_ids, &given_bodies, &given_due, &seq, &given_ttr,
                          &given_flags, &given_extras))
        return NULL;
    memset(&given, 0, sizeof given);
    given.seq = seq;
    given.has_extras = given_extras != Py_None;
    int bad = open_buffer(given_into, &into, PyBUF_WRITABLE) | open_texts(given_ids, &given.ids) | open_texts(given_bodies, &given.bodies);
    bad |= open_column(given_due, &given.due) | open_column(given_ttr, &given.ttr) | open_column(given_flags, &given.flags);
    if (given.has_extras)
        bad |= open_texts(given_extras, &given.extras);
    Py_ssize_t counts[] = {given.ids.count, given.bodies.count, given.due.count, given.ttr.count, given.flags.count};
    for (int i = 0; i < 5; i++)
        bad |= counts[i] >= 0 && counts[i] < last;
    bad |= given.has_extras && given.extras.count < last;
    bad |= at < 0 || first < 0 || seq > INT64_MAX - last || (into.obj && at > into.len);
    for (Py_ssize_t i = first; !bad && i < last; i++) {
        Py_ssize_t size = write_document(&given, i, (char *)into.buf + at, into.len - at);
        bad = size < 0;
        at += bad ? 0 : size;
    }
    if (into.obj)
        PyBuffer_Release(&into);
    close_texts(&given.ids), close_texts(&given.bodies), close_texts(&given.extras);
    close_column(&given.due), close_column(&given.ttr), close_column(&given.flags);
    return bad ? not_mine() : PyLong_FromSsize_t(at);
}

/* Pieces of a buffer. */

static PyObject *checksums(PyObject *module, PyObject *args) { /* (buffer, starts, ends) -> 4 bytes each; pieces are cut off at the end */
    PyObject *given, *given_starts, *given_ends, *out = NULL;
    Py_buffer buffer;
    Column starts, ends;
    if (!PyArg_ParseTuple(args, "OOO", &given, &given_starts, &given_ends))
        return NULL;
    int bad = open_buffer(given, &buffer, 0) | open_column(given_starts, &starts) | open_column(given_ends, &ends);
    const int64_t *start = numbers(&starts, starts.count), *end = numbers(&ends, starts.count);
    if (!bad && start && end && (out = PyBytes_FromStringAndSize(NULL, 4 * starts.count))) {
        char *sums = PyBytes_AsString(out);
        for (Py_ssize_t i = 0; i < starts.count; i++) {
            if (start[i] < 0 || end[i] < 0) { /* counted from the end, in Python */
                Py_CLEAR(out);
                break;
            }
            int64_t stop = end[i] < buffer.len ? end[i] : buffer.len;
            uint32_t crc = start[i] < stop ? crc32_of((const uint8_t *)buffer.buf + start[i], stop - start[i]) : 0;
            memcpy(sums + 4 * i, &crc, 4);
        }
    }
    if (buffer.obj)
        PyBuffer_Release(&buffer);
    close_column(&starts), close_column(&ends);
    return out ? out : not_mine();
}

static PyObject *gather(PyObject *module, PyObject *args) { /* (buffer, at, lengths) -> the pieces back to back */
    PyObject *given, *given_at, *given_lengths, *out = NULL;
    Py_buffer buffer;
    Column at, lengths;
    if (!PyArg_ParseTuple(args, "OOO", &given, &given_at, &given_lengths))
        return NULL;
    int bad = open_buffer(given, &buffer, 0) | open_column(given_at, &at) | open_column(given_lengths, &lengths);
    const int64_t *from = numbers(&at, at.count), *size = numbers(&lengths, at.count);
    bad |= !from || !size;
    int64_t total = 0;
    for (Py_ssize_t i = 0; !bad && i < at.count; i++) {
        bad = from[i] < 0 || size[i] < 0 || size[i] > buffer.len || from[i] > buffer.len - size[i] || total > PY_SSIZE_T_MAX - size[i];
        total += bad ? 0 : size[i];
    }
    if (!bad && (out = PyBytes_FromStringAndSize(NULL, total))) {
        char *to = PyBytes_AsString(out);
        for (Py_ssize_t i = 0; i < at.count; to += size[i], i++)
            memcpy(to, (const char *)buffer.buf + from[i], size[i]);
    }
    if (buffer.obj)
        PyBuffer_Release(&buffer);
    close_column(&at), close_column(&lengths);
    return out ? out : not_mine();
}

enum { PARTS_MAX = 32 };

typedef struct {
    Py_buffer buffer;
    Column at, sizes;
    const int64_t *from;
} Part;

static int open_part(PyObject *given, Part *part, Py_ssize_t *count) {
    PyObject *buffer, *at, *sizes;
    if (!PyArg_ParseTuple(given, "OOO", &buffer, &at, &sizes)) {
        PyErr_Clear();
        return -1;
    }
    if (open_buffer(buffer, &part->buffer, 0) | open_column(at, &part->at) | open_column(sizes, &part->sizes))
        return -1;
    *count = *count < 0 ? part->at.count : *count;
    part->from = numbers(&part->at, *count);
    return part->from && (part->sizes.count < 0 || part->sizes.count == *count) ? 0 : -1;
}

static int piece(const Part *part, Py_ssize_t i, const char **data, int64_t *size) { /* -1: it is not in the buffer */
    if (item(&part->sizes, i, size) || *size < 0 || *size > part->buffer.len)
        return -1;
    if (*size && (part->from[i] < 0 || part->from[i] > part->buffer.len - *size))
        return -1;
    *data = *size ? (const char *)part->buffer.buf + part->from[i] : NULL;
    return 0;
}

/* [(buffer, at, sizes), ...] -> the first piece of each part, then the second of each, ...; and where each row ends, 8 bytes each */
static PyObject *interleave(PyObject *module, PyObject *given) {
    Part parts[PARTS_MAX];
    memset(parts, 0, sizeof parts);
    Py_ssize_t width = is_exact(given, &PyList_Type) ? PyList_Size(given) : 0, count = -1;
    PyObject *joined = NULL, *ends = NULL, *out = NULL;
    int bad = width < 1 || width > PARTS_MAX;
    for (Py_ssize_t k = 0; !bad && k < width; k++) {
        PyObject *part = PyList_GetItem(given, k);
        bad = !is_exact(part, &PyTuple_Type) || open_part(part, &parts[k], &count);
    }
    if (!bad && (ends = PyBytes_FromStringAndSize(NULL, 8 * count))) {
        int64_t total = 0, size;
        const char *data;
        for (Py_ssize_t i = 0; !bad && i < count; i++) {
            for (Py_ssize_t k = 0; !bad && k < width; k++) {
                bad = piece(&parts[k], i, &data, &size) || total > PY_SSIZE_T_MAX - size;
                total += bad ? 0 : size;
            }
            memcpy(PyBytes_AsString(ends) + 8 * i, &total, 8);
        }
        if (!bad && (joined = PyBytes_FromStringAndSize(NULL, total))) {
            char *to = PyBytes_AsString(joined);
            for (Py_ssize_t i = 0; i < count; i++)
                for (Py_ssize_t k = 0; k < width; k++) {
                    if (piece(&parts[k], i, &data, &size) || !size)
                        continue;
                    memcpy(to, data, size);
                    to += size;
                }
            out = Py_BuildValue("OO", joined, ends);
        }
    }
    Py_XDECREF(joined), Py_XDECREF(ends);
    for (Py_ssize_t k = 0; k < width && k < PARTS_MAX; k++) {
        if (parts[k].buffer.obj)
            PyBuffer_Release(&parts[k].buffer);
        close_column(&parts[k].at), close_column(&parts[k].sizes);
    }
    return out ? out : not_mine();
}

/* The hash map of id_map.py: slots of 4 bytes with ordinal + 1, 0 where nothing is; hashes by ordinal. */

typedef struct {
    Py_buffer slots, hashes;
    uint64_t mask;
    Py_ssize_t count; /* of hashes */
} Map;

static int open_map(PyObject *slots, PyObject *hashes, Map *map, int flags) {
    memset(map, 0, sizeof *map);
    if (open_buffer(slots, &map->slots, flags) | open_buffer(hashes, &map->hashes, 0))
        return -1;
    Py_ssize_t size = map->slots.len / 4;
    map->mask = (uint64_t)size - 1;
    map->count = map->hashes.len / 8;
    return map->slots.itemsize == 4 && map->hashes.itemsize == 8 && size > 0 && !(size & (size - 1)) &&
                   ((uintptr_t)map->slots.buf & 3) == 0 && ((uintptr_t)map->hashes.buf & 7) == 0
               ? 0
               : -1;
}

static void close_map(Map *map) {
    if (map->slots.obj)
        PyBuffer_Release(&map->slots);
    if (map->hashes.obj)
        PyBuffer_Release(&map->hashes);
}

/* The slot of a hash, or the free slot where it would go. -1: there is neither, or the map is of other hashes. */
static int64_t slot_of(const Map *map, uint64_t hash) {
    const uint32_t *slots = map->slots.buf;
    const uint64_t *hashes = map->hashes.buf;
    uint64_t at = hash & map->mask;
    for (uint64_t tries = 0; tries <= map->mask; tries++, at = (at + 1) & map->mask) {
        uint32_t there = slots[at];
        if (!there)
            return (int64_t)at;
        if (there > map->count)
            return -1;
        if (hashes[there - 1] == hash)
            return (int64_t)at;
    }
    return -1;
}

/* (slots, hashes, entries) -> [(hash, ordinal that was there, ordinal that came), ...]. `entries` are ordinals + 1. */
static PyObject *enter(PyObject *module, PyObject *args) {
    PyObject *given_slots, *given_hashes, *given_entries, *older = NULL;
    Py_buffer entries;
    Map map;
    if (!PyArg_ParseTuple(args, "OOO", &given_slots, &given_hashes, &given_entries))
        return NULL;
    int bad = open_map(given_slots, given_hashes, &map, PyBUF_WRITABLE) | open_buffer(given_entries, &entries, 0);
    if (!bad && entries.itemsize == 4 && (older = PyList_New(0))) {
        for (Py_ssize_t i = 0; i < entries.len / 4; i++) {
            uint32_t entry;
            memcpy(&entry, (const char *)entries.buf + 4 * i, 4);
            int64_t at = -1;
            uint64_t hash = 0;
            if (entry && entry <= map.count && (hash = ((const uint64_t *)map.hashes.buf)[entry - 1]) == 0)
                continue;
            if (hash)
                at = slot_of(&map, hash);
            if (at < 0) {
                PyErr_SetString(PyExc_IndexError, "an entry without a hash, or a map without a free slot");
                Py_CLEAR(older);
                break;
            }
            uint32_t *slot = (uint32_t *)map.slots.buf + at;
            if (*slot) {
                PyObject *pair = Py_BuildValue("KII", (unsigned long long)hash, *slot - 1, entry - 1);
                int failed = !pair || PyList_Append(older, pair);
                Py_XDECREF(pair);
                if (failed) {
                    Py_CLEAR(older);
                    break;
                }
            }
            *slot = *slot > entry ? *slot : entry;
        }
    }
    if (entries.obj)
        PyBuffer_Release(&entries);
    close_map(&map);
    return older ? older : not_mine();
}

static PyObject *find(PyObject *module, PyObject *args) { /* (slots, hashes, wanted) -> ordinals of 8 bytes, -1 where there is none */
    PyObject *given_slots, *given_hashes, *given_wanted, *out = NULL;
    Py_buffer wanted;
    Map map;
    if (!PyArg_ParseTuple(args, "OOO", &given_slots, &given_hashes, &given_wanted))
        return NULL;
    int bad = open_map(given_slots, given_hashes, &map, 0) | open_buffer(given_wanted, &wanted, 0);
    if (!bad && wanted.itemsize == 8 && (out = PyBytes_FromStringAndSize(NULL, wanted.len))) {
        char *ordinals = PyBytes_AsString(out);
        for (Py_ssize_t i = 0; i < wanted.len / 8; i++) {
            uint64_t hash;
            memcpy(&hash, (const char *)wanted.buf + 8 * i, 8);
            int64_t at = slot_of(&map, hash), ordinal;
            if (at < 0) {
                PyErr_SetString(PyExc_IndexError, "a map of other hashes, or without a free slot");
                Py_CLEAR(out);
                break;
            }
            ordinal = (int64_t)((const uint32_t *)map.slots.buf)[at] - 1;
            memcpy(ordinals + 8 * i, &ordinal, 8);
        }
    }
    if (wanted.obj)
        PyBuffer_Release(&wanted);
    close_map(&map);
    return out ? out : not_mine();
}

/* Checks of what clients send, after it was parsed. */

/* (ids, bytes_max): are these all certainly valid ids? Printable ASCII, not too long, no '/', and no '-' at the start. */
static PyObject *are_plain_ids(PyObject *module, PyObject *args) {
    PyObject *ids;
    Py_ssize_t bytes_max;
    if (!PyArg_ParseTuple(args, "On", &ids, &bytes_max))
        return NULL;
    int plain = is_exact(ids, &PyList_Type);
    Py_ssize_t count = plain ? PyList_Size(ids) : 0;
    for (Py_ssize_t i = 0; plain && i < count; i++) {
        PyObject *id = PyList_GetItem(ids, i);
        Py_ssize_t size = 0;
        const char *data = is_exact(id, &PyUnicode_Type) ? PyUnicode_AsUTF8AndSize(id, &size) : NULL;
        plain = data && size >= 1 && size <= bytes_max && data[0] != '-';
        for (Py_ssize_t k = 0; plain && k < size; k++)
            plain = data[k] >= ' ' && data[k] <= '~' && data[k] != '/';
    }
    PyErr_Clear();
    return PyBool_FromLong(plain);
}

static PyObject *sizes(PyObject *module, PyObject *bodies) { /* of a list of bytes: (their sum, the longest) */
    int plain = is_exact(bodies, &PyList_Type);
    Py_ssize_t count = plain ? PyList_Size(bodies) : 0, total = 0, longest = 0;
    for (Py_ssize_t i = 0; plain && i < count; i++) {
        PyObject *body = PyList_GetItem(bodies, i);
        plain = is_exact(body, &PyBytes_Type);
        Py_ssize_t size = plain ? PyBytes_Size(body) : 0;
        longest = size > longest ? size : longest;
        total += size;
    }
    return plain && count ? Py_BuildValue("nn", total, longest) : not_mine();
}

static PyMethodDef methods[] = {
    {"are_plain_ids", are_plain_ids, METH_VARARGS, NULL},
    {"checksums", checksums, METH_VARARGS, NULL},
    {"document_lengths", document_lengths, METH_VARARGS, NULL},
    {"encode", encode, METH_VARARGS, NULL},
    {"enter", enter, METH_VARARGS, NULL},
    {"find", find, METH_VARARGS, NULL},
    {"gather", gather, METH_VARARGS, NULL},
    {"interleave", interleave, METH_O, NULL},
    {"sizes", sizes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int prepare(PyObject *module) {
    fill_crc_table();
#ifdef HAS_FOLDING
    can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
    const char *wish = getenv("TURTLEMQ_KERNEL");
    if (wish && strcmp(wish, "off") == 0) {
        PyErr_SetString(PyExc_ImportError, "TURTLEMQ_KERNEL is off");
        return -1;
    }
    return PyModule_AddIntConstant(module, "VERSION", 1); /* raise it here and in kernel.py when a function changes */
}

static PyModuleDef_Slot slots_of_module[] = {{Py_mod_exec, prepare}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_kernel", .m_methods = methods, .m_slots = slots_of_module};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
