"""What operators ask of a queue, as Spark jobs over TurtleMQ's files, and the page that shows the answers. See docs/REPORT.md."""
