"""What was built, as data and as a page.

``program`` imports from here; this room imports from ``compile``, ``graph`` and ``diagnostics``.
"""
