"""Work on whole files: convert, diff, inline, validate."""
