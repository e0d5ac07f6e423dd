"""A store on another machine, reached by fsspec."""
