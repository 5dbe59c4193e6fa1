"""The server: a shell around the engine that speaks HTTP. It reads the clock, schedules ticks and holds long polls.

`run` is the process, `app` the routes, `loop` time and waiting; the rest turns requests into engine calls and back.
"""
