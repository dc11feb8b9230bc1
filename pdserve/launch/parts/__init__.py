"""The roles as parts of one process, a file each: a process imports only those that it has.

That is why nothing is imported here: a router needs no HTTP server and no tokenizer, and starts in
half the time and memory without them.
"""
