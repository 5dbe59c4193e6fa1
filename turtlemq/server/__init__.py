"""The HTTP server around the engine. Words: docs/GLOSSARY.md.

- process: `run`, `listen` (sockets, TLS, limits), `config`, `logs`
- connections: `front` (hot requests; `front_desk`, `hot_heads`, `hot_request`), `passed` (all others, by aiohttp)
- loop around the engine: `service` (ticks, commits, fetches) with `commit`, `singles`, `long_polls`, `timerfd`, `fair_turns`,
  `rate_limit`
- a request's way: `app` (middleware), `auth`, `trace`, `request`, `incoming/` (bodies), `handlers/`, `outgoing/` (answers)
- the interface: `operations` (the table of all operations), `openapi`, `media_types`, `topic_settings`, `optional_fields`,
  `errors`, `pages/`
- figures: `metrics/`, `event_log`
"""
