"""The page of ``vkv view``; ``page.html`` is built from ``viewer/`` by ``make viewer``."""
