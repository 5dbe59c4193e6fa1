"""Import of messages that wait in another queue or in a file. `turtlemq import` is the command line of it.

A source (`redis_zset`, `bullmq`, `beanstalkd`, `csv_file`, `sqs_json`) reads batches and removes nothing. `fields` makes ids,
bodies and times of the records; `copy` puts the batches. Ids are made from the ids of the source, so that a second run stores
nothing twice. User guide: docs/MIGRATION.md. Words: docs/GLOSSARY.md.
"""
