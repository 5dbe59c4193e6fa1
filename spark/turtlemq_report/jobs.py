"""The jobs: pure functions from DataFrames to DataFrames.

*Partials* are partial aggregates: rows of a log in buckets of five minutes, with counts and sketches. `merged` combines those of
two runs, so a run reads only the rows since the last one. *Results* are small tables made from partials.

Percentiles come from KLL sketches, which can be merged: exact up to a few hundred values, beyond that within 1.3 % of rank.
Not here: reading logs (`increments`), and the order of the jobs (`run`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation calls it
from pyspark.sql.window import Window

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
BUCKET_MS = 5 * MINUTE_MS
MINUTES, HOURS = 120, 168  # in a forecast: two hours by minute, a week by hour
DELAY_EDGES_MS = (0, 1_000, 10_000, MINUTE_MS, 10 * MINUTE_MS, HOUR_MS, 6 * HOUR_MS, 24 * HOUR_MS, 168 * HOUR_MS, 720 * HOUR_MS)
RETRY, DAMAGED = -1, -2  # values of delay_class for rows without a delay
NO_ERROR = "(no error given)"
LEASE_EXPIRED = "lease expired"  # the broker's error text for a lease that ran out
VERDICT_DELIVERIES_MIN = 20
_ERROR_CHARS_MAX = 120

# Grouping columns of each partial, and the aggregates that merge its other columns.
KEYS = {
    "ready": ("topic", "group", "bucket_ms", "delay_class", "error"),
    "history": ("topic", "group", "bucket_ms", "outcome", "error"),
    "reserve": ("topic", "group", "bucket_ms", "event"),
    "consumer": ("topic", "group", "bucket_ms", "consumer", "outcome", "error"),
}
_MERGES = {"messages": F.sum, "first_ms": F.min, "last_ms": F.max}
LEASES = ("topic", "number", "event", "group", "at_ms", "epoch", "consumer", "offset", "attempt", "error")
SETTLED = ("topic", "event", "outcome", "group", "at_ms", "offset", "reserved_ms")
_SKETCHES = {"ready": ("late",), "history": ("wait", "work"), "reserve": (), "consumer": ("work",)}


def classified(error: Column) -> Column:
    """The class of an error: its first line, with numbers, ids and quoted texts replaced."""
    first = F.trim(F.element_at(F.split(error, "\n"), 1))
    plain = F.regexp_replace(first, r"""(?<![A-Za-z])'[^']*'(?![A-Za-z])|"[^"]*\"""", "'…'")
    plain = F.regexp_replace(plain, r"\b[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}\b", "#")
    plain = F.regexp_replace(plain, r"\b0x[0-9a-fA-F]+\b|\b(?=[0-9a-f]*[0-9])[0-9a-f]{8,}\b|\d+(?:\.\d+)*", "#")
    short = F.substring(F.regexp_replace(plain, r"\s+", " "), 1, _ERROR_CHARS_MAX)
    return F.when(F.coalesce(F.length(short), F.lit(0)) == 0, F.lit(NO_ERROR)).otherwise(short)


def delay_class(delay_ms: Column) -> Column:
    """The number of the first edge in `DELAY_EDGES_MS` that a delay does not pass."""
    number_of = F.lit(len(DELAY_EDGES_MS))
    for number, edge in reversed(list(enumerate(DELAY_EDGES_MS))):
        number_of = F.when(delay_ms <= edge, F.lit(number)).otherwise(number_of)
    return number_of


def _bucket(at_ms: Column, width_ms: int = BUCKET_MS) -> Column:
    return at_ms - F.pmod(at_ms, F.lit(width_ms))


def _sketched(name: str, value: Column) -> list[Column]:
    """A sketch and the maximum of a time span. Negative spans count as 0: clocks may step back."""
    positive = F.when(value.isNotNull(), F.greatest(value, F.lit(0)))
    return [F.kll_sketch_agg_bigint(positive).alias(name), F.max(positive).alias(f"{name}_max")]


# Partials


def ready_partial(ready: DataFrame) -> DataFrame:
    """The ready log: messages by time and class of delay, with their lateness; sleeping retries that came due, by error."""
    col = F.col
    own = col("group").isNotNull()
    kind = F.when(col("damage").isNotNull(), F.lit(DAMAGED)).when(own, F.lit(RETRY))
    return (
        ready.where("state is null or state = 'ready'")
        .withColumn("delay_class", kind.otherwise(delay_class(col("due_ms") - col("created_ms"))))
        .withColumn("error", F.when(own, classified(col("error"))))
        .withColumn("bucket_ms", _bucket(F.coalesce(col("ready_ms"), F.lit(0))))
        .groupBy(*KEYS["ready"])
        .agg(F.count("*").alias("messages"), *_sketched("late", col("ready_ms") - col("due_ms")))
    )


def history_partial(history: DataFrame) -> DataFrame:
    """The history: messages by time, outcome and error, with `wait` (for a consumer) and `work` (of the consumer).

    Only first deliveries count for `wait`, since a retry mostly waits for its back-off."""
    col = F.col
    settled = col("event") == "settle"
    first = F.when(settled & (col("attempt") == 1) & (col("outcome") != "expired"), col("reserved_ms") - col("ready_ms"))
    failed = settled & (col("outcome") != "acked")
    return (
        history.withColumn("outcome", F.when(col("damage").isNotNull(), F.lit("damaged")).otherwise(col("outcome")))
        .withColumn("error", F.when(failed, classified(col("error"))))
        .withColumn("bucket_ms", _bucket(F.coalesce(col("at_ms"), F.lit(0))))
        .groupBy(*KEYS["history"])
        .agg(
            F.count("*").alias("messages"),
            *_sketched("wait", first),
            *_sketched("work", F.when(settled & (col("outcome") != "expired"), col("at_ms") - col("reserved_ms"))),
            F.min("at_ms").alias("first_ms"),
            F.max("at_ms").alias("last_ms"),
        )
    )


def reserve_partial(reserve: DataFrame) -> DataFrame:
    """The journal of leases: messages by time and event."""
    col = F.col
    return (
        reserve.withColumn("event", F.when(col("damage").isNotNull(), F.lit("damaged")).otherwise(col("event")))
        .withColumn("bucket_ms", _bucket(F.coalesce(col("at_ms"), F.lit(0))))
        .groupBy(*KEYS["reserve"])
        .agg(F.count("*").alias("messages"))
    )


def deliveries(leases: DataFrame, settled: DataFrame) -> DataFrame:
    """Each delivery with its consumer and its outcome, which is null while the lease lasts.

    A lease ends with the next event of its message in the journal, or with the settlement that names the lease's time."""
    col = F.col
    known = leases.where("event in ('lease', 'retry', 'moved', 'group', 'forget')")
    known = known.withColumn("offset", F.when(~col("event").isin("group", "forget"), col("offset")))
    message = Window.partitionBy("topic", "group", "offset").orderBy("number")
    newest = Window.partitionBy("topic", "group")
    rows = (
        known.withColumn("epoch_now", F.max("epoch").over(newest))
        .withColumn("next", F.lead("event").over(message))
        .withColumn("next_ms", F.lead("at_ms").over(message))
        .withColumn("next_error", F.lead("error").over(message))
        .withColumn("next_attempt", F.lead("attempt").over(message))
        .where("event = 'lease'")
    )
    ends = settled.where("event = 'settle'").select(
        "topic", "group", "offset", col("reserved_ms").alias("at_ms"), col("outcome").alias("end"), col("at_ms").alias("end_ms")
    )
    returned = (col("next") == "retry") & (col("next_attempt") == col("attempt"))
    lapsed = (col("next") == "retry") & (col("next_error") == LEASE_EXPIRED)
    outcome = (
        F.when(col("end").isNotNull(), col("end"))
        .when(returned, F.lit("returned"))
        .when(lapsed, F.lit("lapsed"))
        .when(col("next").isin("retry", "moved"), F.lit("failed"))
        .when(col("next").isNotNull() | (col("epoch") < col("epoch_now")), F.lit("forgotten"))
    )
    joined = rows.join(ends, ["topic", "group", "offset", "at_ms"], "left")
    known_end = joined.withColumn("outcome", outcome).withColumn("ended_ms", F.coalesce("end_ms", "next_ms"))
    return known_end.select(*LEASES, "outcome", "ended_ms", "next", "next_error")


def consumer_partial(delivered: DataFrame) -> DataFrame:
    """Finished deliveries by time, consumer and outcome, with `work`; errors only of short back-offs.

    A retry after a long back-off sleeps in the delay log, and has its error in the ready log when it comes due."""
    again = F.col("next") == "retry"
    return (
        delivered.where("outcome is not null and outcome != 'expired'")
        .withColumn("bucket_ms", _bucket(F.coalesce("ended_ms", "at_ms")))
        .withColumn("consumer", F.coalesce("consumer", F.lit("")))
        .withColumn("error", F.when(F.col("outcome").isin("failed", "lapsed") & again, classified(F.col("next_error"))))
        .groupBy(*KEYS["consumer"])
        .agg(F.count("*").alias("messages"), *_sketched("work", F.col("ended_ms") - F.col("at_ms")))
    )


def under_way(delivered: DataFrame) -> DataFrame:
    """Leases that have not ended, saved for the next run."""
    return delivered.where("outcome is null").select(*LEASES)


def unclaimed(settled: DataFrame, leases: DataFrame) -> DataFrame:
    """Settlements without their leases, saved for the next run, as a crash that took the end of one journal may leave them."""
    keys = ["topic", "group", "offset", "reserved_ms"]
    seen = leases.groupBy("topic").agg(F.max("at_ms").alias("seen_ms"))
    young = settled.where("event = 'settle'").join(F.broadcast(seen), ["topic"], "left")
    taken = leases.where("event = 'lease'").withColumn("reserved_ms", F.col("at_ms")).select(*keys)
    return young.where("seen_ms is null or reserved_ms >= seen_ms").join(taken, keys, "left_anti").select(*SETTLED)


def merged(partials: DataFrame, kind: str, *keys: str) -> DataFrame:
    """Partials of one kind merged: of several runs, or, with fewer `keys`, of several topics or times."""
    aggregates = [merge(name).alias(name) for name, merge in _MERGES.items() if name in partials.columns]
    for name in _SKETCHES[kind]:
        aggregates += [F.kll_merge_agg_bigint(name).alias(name), F.max(f"{name}_max").alias(f"{name}_max")]
    return partials.groupBy(*(keys or KEYS[kind])).agg(*aggregates)


# Results


def forecast(due: DataFrame, now_ms: int) -> DataFrame:
    """Sleepers by due time: a row for each topic and minute of the next two hours, for each hour of the next week, for overdue
    sleepers, and for all later ones. Requires `due`: counts by topic and minute, from the tables of the index."""
    this_minute, this_hour = now_ms - now_ms % MINUTE_MS, now_ms - now_ms % HOUR_MS
    col, at = F.col, F.col("due_ms")
    late = at < this_minute
    minute = F.when(~late & (at < this_minute + MINUTES * MINUTE_MS), F.struct(F.lit("minute").alias("unit"), at.alias("at_ms")))
    hour = F.struct(F.lit("hour").alias("unit"), _bucket(at, HOUR_MS).alias("at_ms"))
    hours = F.when(~late & (at < this_hour + HOURS * HOUR_MS), hour)
    rest = F.when(late, F.struct(F.lit("overdue").alias("unit"), F.lit(0).cast("bigint").alias("at_ms"))).when(
        at >= this_hour + HOURS * HOUR_MS, F.struct(F.lit("later").alias("unit"), F.lit(0).cast("bigint").alias("at_ms"))
    )
    rows = due.withColumn("slot", F.explode(F.array(minute, hours, rest))).where("slot is not null")
    return (
        rows.groupBy("topic", col("slot.unit").alias("unit"), col("slot.at_ms").alias("start_ms"))
        .agg(F.sum("messages").alias("messages"))
        .withColumn("start", F.when(col("start_ms") > 0, F.timestamp_millis("start_ms")))
    )


def _percentiles(sketch: str) -> list[Column]:
    known = F.kll_sketch_get_n_bigint(sketch) > 0
    return [
        F.when(known, F.kll_sketch_get_quantile_bigint(sketch, F.lit(rank))).alias(name)
        for name, rank in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99))
    ]


def lateness(ready: DataFrame, history: DataFrame, width_ms: int = BUCKET_MS) -> DataFrame:
    """Percentiles of lateness in two parts: `scheduler` (ready − due) and `consumer` (reserved − ready, of first deliveries).

    A row for each topic and time, for each topic, for each time, and one for all; null means all."""
    parts = None
    for part, partials, kind, sketch in (("scheduler", ready, "ready", "late"), ("consumer", history, "history", "wait")):
        if kind == "ready":
            partials = partials.where(F.col("delay_class") != DAMAGED)
        timed = partials.withColumn("start_ms", _bucket(F.col("bucket_ms"), width_ms))
        each = F.explode(F.array(*(F.struct(t.alias("t"), s.alias("s")) for t in _or_all("topic") for s in _or_all("start_ms"))))
        cube = timed.withColumn("cut", each).groupBy(F.col("cut.t").alias("topic"), F.col("cut.s").alias("start_ms"))
        rows = (
            cube.agg(F.kll_merge_agg_bigint(sketch).alias("sketch"), F.max(f"{sketch}_max").alias("max_ms"))
            .withColumn("messages", F.kll_sketch_get_n_bigint("sketch"))
            .where("messages > 0")
            .select(F.lit(part).alias("part"), "topic", "start_ms", "messages", *_percentiles("sketch"), "max_ms")
        )
        parts = rows if parts is None else parts.union(rows)
    assert parts is not None
    return parts.withColumn("start", F.timestamp_millis("start_ms"))


def _or_all(name: str) -> tuple[Column, Column]:
    kind = "string" if name == "topic" else "bigint"
    return F.col(name).cast(kind), F.lit(None).cast(kind)


def delays(ready: DataFrame) -> DataFrame:
    """Messages by topic and class of the delay that producers asked for; `upto_ms` is the upper edge (null: beyond all)."""
    edges = F.array(*(F.lit(edge).cast("bigint") for edge in DELAY_EDGES_MS))
    rows = ready.where("delay_class >= 0").groupBy("topic", "delay_class").agg(F.sum("messages").alias("messages"))
    return rows.withColumn("upto_ms", F.get(edges, F.col("delay_class")))


def throughput(ready: DataFrame, history: DataFrame, width_ms: int = BUCKET_MS) -> DataFrame:
    """Messages over time: due ones by topic (`what` = ready, no group), finished ones by group and outcome."""
    start = _bucket(F.col("bucket_ms"), width_ms).alias("start_ms")
    came = ready.where(F.col("delay_class") != DAMAGED).select("topic", F.lit(None).cast("string").alias("group"), start,
                                                              F.lit("ready").alias("what"), "messages")  # fmt: skip
    gone = history.where("outcome != 'damaged'").select("topic", "group", start, F.col("outcome").alias("what"), "messages")
    rows = came.union(gone).groupBy("topic", "group", "start_ms", "what").agg(F.sum("messages").alias("messages"))
    return rows.withColumn("start", F.timestamp_millis("start_ms"))


def failures(ready: DataFrame, history: DataFrame, consumer: DataFrame, letters: DataFrame) -> DataFrame:
    """Failures by topic, group and class of error: retries, deaths, and present dead letters.

    A retry after a long back-off counts when it comes due again."""
    keys = ("topic", "group", "error")
    zero = F.lit(0).cast("bigint")

    def counted(rows: DataFrame, name: str) -> DataFrame:
        return rows.select(*keys, *(F.col("messages").alias(n) if n == name else zero.alias(n) for n in _FAILURE_COUNTS))

    short = consumer.where("outcome in ('failed', 'lapsed') and error is not null").select(*keys, "messages")
    retries = short.union(ready.where(F.col("delay_class") == RETRY).select(*keys, "messages"))
    died = history.where("outcome in ('dead', 'expired')")
    present = letters.where("state = 'dead'").withColumn("error", classified(F.col("error")))
    present = present.groupBy(*keys).agg(F.count("*").alias("messages"))
    rows = counted(retries, "retries").union(counted(died, "died")).union(counted(present, "letters"))
    return rows.groupBy(*keys).agg(*(F.sum(name).alias(name) for name in _FAILURE_COUNTS))


_FAILURE_COUNTS = ("retries", "died", "letters")


def consumers(partials: DataFrame, open_: DataFrame) -> DataFrame:
    """Deliveries of each consumer: counts by outcome, time spans, present leases, and a verdict (`slow`, `hot`, `failing` or ``).

    Slow: its median is three times that of its group's middle consumer. Hot: it takes more than twice its fair share. Failing:
    a fifth of its deliveries fail. No verdict below 20 deliveries."""
    col, keys = F.col, ("topic", "group", "consumer")

    def how_many(*outcomes: str) -> Column:
        return F.sum(F.when(col("outcome").isin(*outcomes), col("messages")).otherwise(0))

    ended = partials.groupBy(*keys).agg(
        F.sum("messages").alias("taken"),
        how_many("acked").alias("acked"),
        how_many("failed", "dead").alias("failed"),
        how_many("lapsed").alias("lapsed"),
        F.kll_merge_agg_bigint("work").alias("sketch"),
        F.max("work_max").alias("max_ms"),
    )
    now = open_.withColumn("consumer", F.coalesce("consumer", F.lit(""))).groupBy(*keys)
    holding = now.agg(F.count("*").alias("holds"), F.min("at_ms").alias("oldest_ms"))
    group = Window.partitionBy("topic", "group")
    rows = (
        ended.select(*keys, "taken", "acked", "failed", "lapsed", *_percentiles("sketch"), "max_ms")
        .join(holding, list(keys), "full")
        .fillna(0, ["taken", "acked", "failed", "lapsed", "holds"])
        .withColumn("share", (col("taken") + col("holds")) / F.sum(col("taken") + col("holds")).over(group))
        .withColumn("others", F.count("*").over(group))
        .withColumn("middle_ms", F.percentile_approx("p50_ms", 0.5).over(group))
    )
    many = (col("taken") >= VERDICT_DELIVERIES_MIN) & (col("others") > 1)
    verdict = (
        F.when((col("taken") >= VERDICT_DELIVERIES_MIN) & ((col("failed") + col("lapsed")) * 5 >= col("taken")), F.lit("failing"))
        .when(many & (col("p50_ms") > 3 * F.greatest(col("middle_ms"), F.lit(1))), F.lit("slow"))
        .when(many & (col("share") * col("others") > 2), F.lit("hot"))
        .otherwise(F.lit(""))
    )
    return rows.withColumn("verdict", verdict).drop("others")


def storage(files: DataFrame) -> DataFrame:
    """Each segment of each log with its size, its live sleepers, the bytes of ended ones, and advice by the server's rules.

    `files`: topic, log, segment, bytes, table_bytes, documents, live, sealed, last, compact_live_ratio; see `disk_usage.rows`."""
    col = F.col
    asleep = col("log") == "delay"
    ratio = F.when(col("documents") > 0, col("live") / col("documents"))
    room = (col("bytes") * (1 - F.coalesce(ratio, F.lit(1.0)))).cast("bigint")
    advice = (
        F.when(~asleep, F.lit(""))
        .when(col("last"), F.lit("grows"))
        .when(col("live") == 0, F.lit("will be removed"))
        .when(ratio <= col("compact_live_ratio"), F.lit("will be compacted"))
        .when(~col("sealed"), F.lit("will be sealed"))
        .when(ratio < 0.5, F.lit("compact to free room"))
        .otherwise(F.lit(""))
    )
    return (
        files.withColumn("live_ratio", F.when(asleep, ratio))
        .withColumn("ended_bytes", F.when(asleep, room).otherwise(F.lit(0)))
        .withColumn("advice", advice)
        .drop("compact_live_ratio", "last")
    )
