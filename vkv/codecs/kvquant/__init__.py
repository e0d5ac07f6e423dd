"""Codec `kvquant`: non-uniform levels, sparse outliers, exact sinks."""
