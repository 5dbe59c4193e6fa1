"""Django: settings in TURTLEMQ, `put` in a view, and a management command that consumes.

With "turtlemq.integrations.django" in INSTALLED_APPS:

    put("orders", {"close": order.pk}, id=f"order-{order.pk}", delay=1800)

    python manage.py turtlemq_consume orders shop.handlers.close_order

`producer` has the functions, `apps` the configuration. User guide: docs/INTEGRATIONS.md. Words: docs/GLOSSARY.md.
"""
