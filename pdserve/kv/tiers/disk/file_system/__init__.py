"""Files as the operating system has them: descriptors, reads and writes past the page cache."""
