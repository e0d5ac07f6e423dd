"""Codec `lossless`: every bit given back, in about two thirds of the bytes."""
