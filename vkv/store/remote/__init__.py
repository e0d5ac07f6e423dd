"""Keep a store on another machine, reached by fsspec."""
