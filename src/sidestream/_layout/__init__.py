"""Plans for saves and loads: flattening, layout, matching, ranges. The room has no I/O."""
