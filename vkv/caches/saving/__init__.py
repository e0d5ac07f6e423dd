"""Save live caches: snapshot, tensor plan, encoded tensor, file."""
