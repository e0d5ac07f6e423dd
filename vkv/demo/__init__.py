"""The demo model, made from a package of the index."""
