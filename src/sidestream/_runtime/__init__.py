"""The base of all other rooms: threads, tasks, the GIL, calls into user code, private torch names."""
