"""What every other room needs: threads, tasks, the GIL, calls into user code, private torch names."""
