"""What to do, decided before anything is done: flattening, layout, matching, ranges. Pure: no I/O."""
