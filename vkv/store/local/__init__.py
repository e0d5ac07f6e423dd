"""Keep a store on this machine: index, entries, prefix tree."""
