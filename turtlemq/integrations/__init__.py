"""Integrations with frameworks: `starlette` (also FastAPI), `django`, `celery` and `dramatiq`.

Each is a small module that imports its framework, and is imported by applications only: neither server nor client loads it.
`delayed_tasks` is the part that Celery and dramatiq share. User guide: docs/INTEGRATIONS.md. Words: docs/GLOSSARY.md.
"""
