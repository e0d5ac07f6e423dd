"""The command line ``vkv``: arguments, output and progress around the library, nothing else."""
