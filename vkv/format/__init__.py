"""Read and write the bytes of a .vkv file: container, header, dependencies, byte account."""
