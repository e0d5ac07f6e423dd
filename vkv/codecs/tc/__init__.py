"""Codec `tc`: transform coding with an entropy coder."""
